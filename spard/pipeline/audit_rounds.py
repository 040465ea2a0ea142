"""A sequential audit: each suite is asked in rounds until the gate's decision on it is as good as certain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spard import distributed
from spard.config import ON_FIGURES
from spard.digests import file_sha256
from spard.errors import InvalidSuite, convert_errors
from spard.evaluation.ask import Speaker
from spard.evaluation.audit import Measurement, Replies, Suite, ask_suites, sample
from spard.evaluation.gate import is_gated
from spard.evaluation.judges.base import Judge
from spard.evaluation.mined_suites import suites_secret
from spard.evaluation.results import HARMLESS, PLAIN
from spard.evaluation.rounds import Rules, audit_in_rounds
from spard.evaluation.vllm_offline.engine import transformers
from spard.pipeline.audit_engine import BaseFigures, current_engine, generator
from spard.pipeline.context import Context
from spard.pipeline.row_judging import may_read_harmless
from spard.release.records import AuditEngineRecord


def is_possible(context: Context) -> bool:
    """Return True if the run's audit is sequential.

    vLLM answers all prompts at once, and a gate that decides on bare rates has no bounds to stop on.
    """
    limits = context.run.thresholds
    decides_on_bounds = limits.confidence != ON_FIGURES and not limits.correct_judge_errors
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
    """Measure the trained model in rounds; return a measurement per suite and a record of the engine.

    The order of the prompts is derived from the provider's prompts and the training file, which makes it unpredictable
    for whoever writes the training file. The ranks of a run share the prompts, and rank 0's judge scores them.
    `looked_twice` and `sampled` are passed on to `Rules`; `show(done, total)` replaces the run's progress.
    """
    most = context.recipe.audit.max_prompts
    speaker, record = generator(context, [], model)
    whole = [replace(suite, prompts=tuple(sample(suite.prompts, most))) for suite in suites]
    reads_harmless = any(each.kind in HARMLESS for each in suites) and may_read_harmless(context, judge)
    asker = _Asker(context, speaker, judge, reads_harmless, sum(len(each.prompts) for each in whole), show)
    secret = f"{suites_secret(each for each in suites if each.kind in PLAIN)}\n{file_sha256(context.run.training_file)}"
    known = {each.suite: each for each in base.results(model)}
    limits = context.run.thresholds
    gated = sum(is_gated(each.kind, limits) for each in suites)
    asker.show_progress(0)
    rules = Rules(limits, secret, judge.name, gated, looked_twice, sampled)
    found = audit_in_rounds(asker.ask, whole, known, lambda names: base.ask(names, model), rules)
    # Most suites end early, so the progress jumps to its end here.
    asker.show_progress(asker.total)
    return found, replace(record, replies={"transformers": asker.asked})


@dataclass
class _Asker:
    """Asks the trained model blocks of suites, at most `total` prompts in all, and shows the progress."""

    context: Context
    speaker: Speaker
    judge: Judge
    reads_harmless: bool
    total: int
    show: Callable[[int, int], None] | None
    asked: int = 0

    def ask(self, blocks: Sequence[Suite]) -> list[Replies]:
        """Return the replies to each block; they are the same on every rank."""
        limit = self.context.recipe.audit.max_new_tokens
        self.context.report.count_afresh()
        with convert_errors(InvalidSuite):
            found = ask_suites(self.speaker, blocks, self.judge, limit, self._note, reads_harmless=self.reads_harmless)
        self.asked += sum(len(each.prompts) for each in blocks)
        return distributed.broadcast_object(found)

    def show_progress(self, done: int) -> None:
        """Report that `done` prompts have been asked."""
        if self.show:
            self.show(done, self.total)
        else:
            doing = f"asking the trained model {self.total:,} prompts"
            self.context.report.activity(doing, done, self.total, at_most=True)
            self.context.report.progress(done, self.total, is_counted=False)  # base model prompts come between

    def _note(self, done: int, _: int) -> None:
        self.show_progress(self.asked + done)
        self.context.report.count(done)
        self.context.raise_if_stopped()
