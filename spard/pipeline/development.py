"""A small measurement at each end of an epoch, by which a run picks the best one: safety and validation loss.

Safety is the gate's decision on the development shares of the suites, whose prompts the last audit never asks. The base
model answers the same prompts once, before the training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite, nan

from spard.config import ON_FIGURES, GateThresholds
from spard.evaluation.audit import Suite
from spard.evaluation.gate import gate
from spard.evaluation.results import SuiteResult
from spard.pipeline import audit
from spard.pipeline.base_figures import base_key
from spard.pipeline.context import Context
from spard.pipeline.rows import Rows
from spard.pipeline.train import TrainingResult, validate
from spard.release.records import ComparedEpoch, EndingRecord, read_record
from spard.training.epoch_ends import EpochEnd, EpochResult


@dataclass(frozen=True, slots=True)
class Development:
    """The stage that measures the end of each epoch on the development shares `suites`.

    `base` has the base model's results on the same suites.
    """

    context: Context
    rows: Rows
    suites: Sequence[Suite]
    base: Sequence[SuiteResult]

    def run(self, end: EpochEnd) -> EpochResult:
        """Measure the model at the end of an epoch; an earlier attempt's results for the same weights are reused."""
        started = time.perf_counter()
        with self.context.time_stage("compare"):
            found = self._measure(end)
        self.context.report.cost("compare", time.perf_counter() - started, 1)
        validation = validate(self.context, self.rows, end.references)
        # `EpochResult` ranks NaN last, so without validation rows safety alone decides.
        loss = nan if validation is None else validation.loss
        attacks = [each for each in found if each.kind == "harmful" and each.n]
        attacked = sum(each.hits for each in attacks) / sum(each.n for each in attacks) if attacks else None
        within = gate(self.base, found, self._thresholds()).decision == "pass" if self.suites else None
        return EpochResult(end.epoch, end.step, within, attacked, loss)

    def _measure(self, end: EpochEnd) -> list[SuiteResult]:
        if not self.suites:
            return []
        name, weights = f"compared-{end.step:06d}", audit.weights_digest(end.model)
        kept = self.context.outputs.read(name)
        if kept is None or kept["weights"] != weights:

            def tell(done: int, total: int) -> None:
                doing = f"asking {total:,} prompts to compare the end of epoch {end.epoch} with the others"
                self.context.report.activity(doing, done, total)
                self.context.report.progress(end.step, end.total_steps)

            found = audit.measure(self.context, self.suites, end.model, tell)
            kept = {"weights": weights, "results": [asdict(each) for each in found]}
            self.context.outputs.write(name, kept)
        return [read_record(SuiteResult, each) for each in kept["results"]]

    def _thresholds(self) -> GateThresholds:
        """Return thresholds on bare rates: a development share is too small for bounds; the last audit has them."""
        return replace(self.context.run.thresholds, confidence=ON_FIGURES)


def measure_base(context: Context, rows: Rows) -> Development | None:
    """Measure the base model on the development shares; None if the run does not compare ends of epochs."""
    if not context.recipe.ending.compares:
        return None
    suites = [share for _, share in audit.split_suites(context) if share]
    if not any(suite.kind == "harmful" for suite in suites):
        said = "No harmful suite has the 100 prompts that leave a share for the choice of an end of an epoch"
        context.report.warning(f"{said}: the loss on validation rows decides alone.")
        suites = []
    with context.time_stage("audit"):
        key = base_key(context) | {"shares": context.recipe.ending.prompts}
        found = context.cache.json("audits", key, partial(_measure_suites, context, suites))
    return Development(context, rows, suites, [read_record(SuiteResult, each) for each in found])


def ending_record(context: Context, rows: Rows, tuned: TrainingResult) -> EndingRecord | None:
    """Return the record of the released epoch and the reason; None if ends of epochs were not compared."""
    ended = tuned.trained.ended
    if ended is None:
        return None
    compared = [
        ComparedEpoch(each.epoch, each.step, each.within, each.attacked, each.loss if isfinite(each.loss) else None)
        for each in ended.standings
    ]
    done = compared[-1].epoch
    return EndingRecord(
        keep=context.recipe.ending.keep,
        released_epoch=ended.released.epoch,
        released_step=ended.released.step,
        trained_epochs=done,
        planned_epochs=ended.planned_epochs,
        why="all_epochs" if done == ended.planned_epochs else "no_better",
        held_out=0 if context.run.validation_file else len(rows.validation),
        epochs=tuple(compared),
    )


def _measure_suites(context: Context, suites: Sequence[Suite]) -> list[Mapping[str, object]]:
    return [asdict(each) for each in audit.measure(context, suites)]
