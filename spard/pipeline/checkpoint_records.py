"""Measurements of checkpoints, stored as outputs of the run until its report is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from spard.config.run_spec import to_mapping
from spard.evaluation.results import SuiteResult
from spard.evaluation.vllm_offline.engine import Engine
from spard.pipeline.context import Context
from spard.pipeline.train import TrainingResult
from spard.release.figures import checkpoint_metrics
from spard.release.report import CheckpointRecord, GateRecord, Summary, read_record

Found = tuple[CheckpointRecord, list[SuiteResult]]


def keep(
    context: Context, weights: str, engine: Engine, record: CheckpointRecord, results: Sequence[SuiteResult]
) -> None:
    """Store the record and the results of a checkpoint with the digest of its weights and the audit engine."""
    value = {"weights": weights, "engine": asdict(engine), "record": to_mapping(record)}
    context.outputs.write(_output(record.step), value | {"results": [asdict(each) for each in results]})


def read_kept(context: Context, step: int, weights: str | None = None, engine: Engine | None = None) -> Found | None:
    """Return the record and results stored for a step, or None.

    With `weights` or `engine`, also return None if the stored digest or engine differs.
    """
    value = context.outputs.read(_output(step))
    if value is None or weights not in (None, value["weights"]):
        return None
    if engine is not None and value.get("engine") != asdict(engine):
        return None
    return CheckpointRecord.from_json(value["record"]), [read_record(SuiteResult, each) for each in value["results"]]


def epoch_records(
    context: Context, tuned: TrainingResult, summary: Summary, decision: GateRecord
) -> tuple[CheckpointRecord, ...]:
    """Return the checkpoint records of a run's epochs, ordered by step.

    `summary` and `decision` belong to the released epoch: the last one, unless the run chose another.
    """
    ended, released = tuned.trained.ended, tuned.released_step
    epochs = len(ended.standings) if ended else tuned.resolved.n_epochs
    each_epoch = tuned.trained.steps // epochs
    others = [read_kept(context, step) for epoch in range(1, epochs + 1) if (step := each_epoch * epoch) != released]
    own = CheckpointRecord(
        released // each_epoch,
        released,
        checkpoint_metrics(tuned.trained.metrics[released - 1], tuned.after),
        decision,
        summary.asr,
        summary.harmfulness_score,
        summary.over_refusal,
        summary.utility,
    )
    records = [own, *(found[0] for found in others if found)]
    return tuple(sorted(records, key=lambda record: record.step))


def _output(step: int) -> str:
    return f"checkpoint-{step:06d}"
