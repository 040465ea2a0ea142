"""The last audit in rounds: each suite is asked only until the gate's decision on it is as good as certain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from spard import distributed
from spard.config import ON_FIGURES
from spard.digests import file_sha256
from spard.errors import InvalidSuite, raised_as
from spard.evaluation.audit import Measurement, Replies, Suite, ask_suites, sample
from spard.evaluation.gate import is_gated
from spard.evaluation.judges.base import Judge
from spard.evaluation.mined_suites import secret_of
from spard.evaluation.results import HARMLESS, PLAIN
from spard.evaluation.rounds import Rules, audit_in_rounds
from spard.evaluation.vllm_offline.engine import transformers
from spard.pipeline.audit_engine import BaseFigures, engine_of, generator
from spard.pipeline.context import Context
from spard.pipeline.judge_false_positives import may_read_harmless
from spard.release.audit_engine_record import AuditEngineRecord


def is_possible(context: Context) -> bool:
    """Tell whether the run asks in rounds: vLLM answers all at once, and on bare figures no part decides."""
    decides_on_bounds = context.run.thresholds.confidence != ON_FIGURES
    return context.recipe.audit.sequential and decides_on_bounds and engine_of(context) == transformers()


def measure(
    context: Context,
    suites: Sequence[Suite],
    model: Any,
    base: BaseFigures,
    looked_twice: Collection[str],
    judge: Judge,
) -> tuple[list[Measurement], AuditEngineRecord]:
    """Measure the trained model, and return with what was measured who answered.

    The order of prompts is drawn by the provider's prompts and the training file, so that nobody who makes the file
    knows it. The ranks of a run share the prompts, and have the verdicts of the first one's judge.
    """
    most, asked = context.recipe.audit.max_prompts, 0
    speaker, record = generator(context, [], model)
    reads_harmless = any(each.kind in HARMLESS for each in suites) and may_read_harmless(context, judge)
    whole = [replace(suite, prompts=tuple(sample(suite.prompts, most))) for suite in suites]
    total = sum(len(suite.prompts) for suite in whole)

    def tell(done: int, _: int) -> None:
        context.report.progress(asked + done, total, is_counted=False)  # questions to the base model come between
        context.report.count(done)
        context.go_on()

    def ask(blocks: Sequence[Suite]) -> list[Replies]:
        nonlocal asked
        limit = context.recipe.audit.max_new_tokens
        context.report.count_afresh()
        with raised_as(InvalidSuite):
            found = ask_suites(speaker, blocks, judge, limit, tell, reads_harmless=reads_harmless)
        asked += sum(len(each.prompts) for each in blocks)
        return distributed.said(found)

    secret = f"{secret_of(each for each in suites if each.kind in PLAIN)}\n{file_sha256(context.run.training_file)}"
    known = {each.suite: each for each in base.results(model)}
    limits = context.run.thresholds
    rules = Rules(limits, secret, judge.name, sum(is_gated(each.kind, limits) for each in suites), looked_twice)
    found = audit_in_rounds(ask, whole, known, lambda names: base.ask(names, model), rules)
    context.report.progress(total, total, is_counted=False)
    return found, replace(record, replies={"transformers": asked})
