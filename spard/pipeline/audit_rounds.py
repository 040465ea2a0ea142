"""An audit in rounds: each suite is asked only until the gate's decision on it is as good as certain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from spard import distributed
from spard.config import ON_FIGURES
from spard.digests import file_sha256
from spard.errors import InvalidSuite, convert_errors
from spard.evaluation.audit import Measurement, Replies, Suite, ask_suites, sample
from spard.evaluation.gate import is_gated
from spard.evaluation.judges.base import Judge
from spard.evaluation.mined_suites import suites_secret
from spard.evaluation.results import HARMLESS, PLAIN
from spard.evaluation.rounds import Rules, audit_in_rounds
from spard.evaluation.vllm_offline.engine import transformers
from spard.pipeline.audit_engine import BaseFigures, current_engine, generator
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import may_read_harmless
from spard.release.audit_engine_record import AuditEngineRecord


def is_possible(context: Context) -> bool:
    """Tell whether the run asks in rounds: vLLM answers all at once, and on bare figures no part decides."""
    decides_on_bounds = context.run.thresholds.confidence != ON_FIGURES
    return context.recipe.audit.sequential and decides_on_bounds and current_engine(context) == transformers()


def measure(
    context: Context,
    suites: Sequence[Suite],
    model: Any,
    base: BaseFigures,
    judge: Judge,
    *,
    looked_twice: Collection[str] = (),
    sampled: Collection[str] = (),
    show: Callable[[int, int], None] | None = None,
) -> tuple[list[Measurement], AuditEngineRecord]:
    """Measure the trained model, and return with what was measured who answered.

    The order of prompts is drawn by the provider's prompts and the training file, so that nobody who makes the file
    knows it. The ranks of a run share the prompts, and have the verdicts of the first one's judge. `looked_twice` and
    `sampled` are those of `Rules`; `show` is told how many replies there are and may be, in place of the progress.
    """
    most, asked = context.recipe.audit.max_prompts, 0
    speaker, record = generator(context, [], model)
    reads_harmless = any(each.kind in HARMLESS for each in suites) and may_read_harmless(context, judge)
    whole = [replace(suite, prompts=tuple(sample(suite.prompts, most))) for suite in suites]
    total = sum(len(suite.prompts) for suite in whole)

    def show_progress(done: int, most: int) -> None:
        context.report.progress(done, most, is_counted=False)  # questions to the base model come between

    show = show or show_progress

    def tell(done: int, _: int) -> None:
        show(asked + done, total)
        context.report.count(done)
        context.raise_if_stopped()

    def ask(blocks: Sequence[Suite]) -> list[Replies]:
        nonlocal asked
        limit = context.recipe.audit.max_new_tokens
        context.report.count_afresh()
        with convert_errors(InvalidSuite):
            found = ask_suites(speaker, blocks, judge, limit, tell, reads_harmless=reads_harmless)
        asked += sum(len(each.prompts) for each in blocks)
        return distributed.broadcast_object(found)

    secret = f"{suites_secret(each for each in suites if each.kind in PLAIN)}\n{file_sha256(context.run.training_file)}"
    known = {each.suite: each for each in base.results(model)}
    limits = context.run.thresholds
    gated = sum(is_gated(each.kind, limits) for each in suites)
    rules = Rules(limits, secret, judge.name, gated, looked_twice, sampled)
    found = audit_in_rounds(ask, whole, known, lambda names: base.ask(names, model), rules)
    show(total, total)
    return found, replace(record, replies={"transformers": asked})
