"""Checkpoints: the measurement of the adapter at the end of each epoch, and the adapter itself if it may be released.

A checkpoint is the model that the run returns if it ends there: averaged and projected like the last weights, measured
on all validation rows, and audited with a part of each gated suite. The last audit's thresholds apply; a checkpoint
whose intervals are too wide to decide is not released. The end of the last epoch is the run's own result, with the full
audit. An end of an epoch whose checkpoint is not kept is audited only if the run ends early and the checkpoint is kept
after all. Checkpoints change no weight of the training, and an audit that fails does not end it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from spard import distributed
from spard.config import resolve
from spard.config.run_spec import to_mapping
from spard.digests import write_manifest
from spard.errors import AdapterNotProved, JudgeUnavailable, is_gpu_out_of_memory
from spard.evaluation.audit import Suite, sample
from spard.evaluation.gate import Gate, is_gated, worse
from spard.evaluation.results import ATTACKS, SuiteResult
from spard.pipeline import agent, audit, audit_rounds, checkpoint_records, costs, package
from spard.pipeline.audit_engine import BaseFigures, current_engine
from spard.pipeline.checkpoint_records import Found
from spard.pipeline.context import CheckpointPlan, Context
from spard.pipeline.package import Release
from spard.pipeline.rows import Rows
from spard.pipeline.train import validate
from spard.release.archive import folder_name
from spard.release.figures import checkpoint_metrics
from spard.release.proof import CleanProcess
from spard.release.report import AuditResults, CheckpointRecord, GateRecord, summarize
from spard.release.version import code_version
from spard.training.epoch_ends import EpochEnd


@dataclass(frozen=True)
class Checkpoints:
    """The stage that takes a checkpoint at the end of each epoch, as `plan` says."""

    context: Context
    plan: CheckpointPlan
    release: Release
    rows: Rows
    base: BaseFigures
    clean: CleanProcess | None

    def run(self, end: EpochEnd) -> None:
        """Measure the model at the end of an epoch, save its adapter if it passed, and report both.

        What an earlier attempt has measured or saved is not done again. An end that is shown again is audited even if
        the run was asked to stop: the audit is the reason for showing it again.
        """
        if end.is_shown_again and distributed.broadcast_object(self.context.should_stop()):
            context = replace(self.context, should_stop=_never)
            replace(self, context=context, base=self.base.with_context(context)).run(end)
            return
        if end.step <= self.plan.taken_until and not end.is_shown_again:
            return
        with self.context.time_stage("checkpoints"), self._told_cost(end):
            # The clean process loads its libraries while the audit runs, and is ready for the proof.
            if self.clean and self._is_audited(end):
                self.clean.start()
            weights = audit.weights_digest(end.model)
            record, results = self._measure(end, weights)
            checkpoint_records.keep(self.context, weights, current_engine(self.context), record, results)
            # The record is stored before the adapter is saved and proved: an attempt that dies there does not repeat
            # the audit.
            if _is_released(record):
                record = self._save(end, record, results)
                checkpoint_records.keep(self.context, weights, current_engine(self.context), record, results)
        safety = {**record.safety(), "audit_version": audit.audit_version(self.context)} if record.gate else None
        is_released = _is_released(record)
        self.context.report.checkpoint(
            end.step, record.metrics, safety, has_adapter=is_released, is_shown_again=end.is_shown_again
        )

    def _told_cost(self, end: EpochEnd) -> AbstractContextManager[None]:
        """Return a context that reports the cost of the audit, if this end of an epoch is audited."""
        return costs.counted_replies(self.context, "checkpoint") if self._is_audited(end) else nullcontext()

    def _is_audited(self, end: EpochEnd) -> bool:
        return bool(self.plan.prompts) and end.is_kept

    def _save(self, end: EpochEnd, record: CheckpointRecord, results: Sequence[SuiteResult]) -> CheckpointRecord:
        """Save an adapter that passed; remove it and withhold the checkpoint if the proof fails."""
        folder = self.plan.folder / f"step-{end.step:06d}" / "adapter"
        named = folder_name(self.release.job_id, end.step)
        saved = package.save(self.context, end.model, folder, self._facts(end, record, results), named)
        try:
            proof = package.prove_adapter(self.context, self.clean, end.model, folder, self.rows.examples)
        except AdapterNotProved as error:
            if distributed.rank() == 0:
                shutil.rmtree(folder.parent)
            return replace(record, gate=GateRecord("inconclusive", (error.message,), ()))
        if distributed.rank() == 0:
            write_manifest(folder, saved | {"proof": asdict(proof)})
        return record

    @cached_property
    def _suites(self) -> list[Suite]:
        """The gated suites, each with the prompts of the last audit."""
        suites = audit.run_suites(self.context, self.rows.examples)
        gated = [suite for suite in suites if is_gated(suite.kind, self.context.run.thresholds)]
        return [_part(suite, self.context.recipe.audit.max_prompts) for suite in gated]

    @cached_property
    def _leaks(self) -> Mapping[str, Sequence[str]]:
        return audit.find_run_leaks(self.context)

    @cached_property
    def _sampled_suites(self) -> set[str]:
        """The names of the suites of which a checkpoint is asked only a part."""
        return {suite.name for suite in self._suites if len(suite.prompts) > self.plan.prompts}

    def _measure(self, end: EpochEnd, weights: str) -> Found:
        """Measure the model at the end of an epoch, or reuse an earlier attempt's results for the same weights.

        The gate decides again on reused results, because the records of the judge's errors may have changed.
        """
        found = checkpoint_records.read_kept(self.context, end.step, weights, current_engine(self.context))
        if found and (found[0].gate or not self._is_audited(end)):
            record, results = found
            return (self._decide(end, record, results), results) if results else found
        record = found[0] if found else self._validate(end)
        if not self._is_audited(end):
            return record, []
        try:
            results = self._audit(end)
        except (JudgeUnavailable, RuntimeError) as error:
            is_alone = distributed.world_size() == 1  # other ranks are waiting in the middle of the audit
            if not is_alone or (isinstance(error, RuntimeError) and not is_gpu_out_of_memory(error)):
                raise
            why = "the judge did not answer" if isinstance(error, JudgeUnavailable) else "the GPU has too little memory"
            open_question = Gate("inconclusive", (f"The checkpoint could not be audited: {why}.",))
            return self._judge(end, record, [], open_question), []
        return self._decide(end, record, results), results

    def _validate(self, end: EpochEnd) -> CheckpointRecord:
        validation = validate(self.context, self.rows, end.references)
        return CheckpointRecord(end.epoch, end.step, checkpoint_metrics(end.metrics, validation))

    def _audit(self, end: EpochEnd) -> list[SuiteResult]:
        """Ask the same prompts at every checkpoint, in rounds if the last audit is sequential."""

        def show(done: int, total: int) -> None:
            self.context.report.activity(doing, done, total, at_most=is_in_rounds)
            self.context.report.progress(end.step, end.total_steps, is_counted=False)  # steps, not replies

        def tell(done: int, total: int) -> None:
            self.context.report.count(done)
            show(done, total)

        asked = [_part(suite, self.plan.prompts) for suite in self._suites]
        is_in_rounds = audit_rounds.is_possible(self.context)
        doing = _describe_asking(asked, end)
        show(0, sum(len(each.prompts) for each in asked))
        if is_in_rounds:
            judge = audit.open_run_judge(self.context)
            found, _ = audit_rounds.measure(
                self.context, asked, end.model, self.base, judge, sampled=self._sampled_suites, show=show
            )
            return [each.result for each in found]
        speaker, _ = audit.by_engine(self.context, asked, end.model)
        return audit.measure(self.context, asked, end.model, tell, speaker)

    def _decide(self, end: EpochEnd, record: CheckpointRecord, results: Sequence[SuiteResult]) -> CheckpointRecord:
        decided = audit.decide(
            self.context,
            self.base.compare(results, end.model, self._sampled_suites),
            results,
            self._leaks,
            self._sampled_suites,
        )
        if reasons := withholding_reasons(self.context):
            decided = worse(decided, Gate("inconclusive", reasons), says="")
        return self._judge(end, record, results, decided)

    def _judge(
        self, end: EpochEnd, record: CheckpointRecord, results: Sequence[SuiteResult], decided: Gate
    ) -> CheckpointRecord:
        summary = summarize(AuditResults(self.base.results(end.model), results, decided))
        return replace(
            record,
            gate=GateRecord.from_gate(decided, is_waived=self.release.waived),
            asr=summary.asr,
            harmfulness_score=summary.harmfulness_score,
            over_refusal=summary.over_refusal,
            utility=summary.utility,
        )

    def _facts(self, end: EpochEnd, record: CheckpointRecord, results: Sequence[SuiteResult]) -> dict[str, object]:
        """Return the manifest's facts about the checkpoint: its provenance, settings and measurements."""
        context = self.context
        return {
            "job_id": self.release.job_id,
            "checkpoint": {"epoch": record.epoch, "step": record.step, "metrics": dict(record.metrics)},
            "base_digest": context.base.digest,
            "recipe": to_mapping(context.recipe),
            "resolved": to_mapping(resolve(context.recipe, len(self.rows.task), context.base.hidden_size)),
            "thresholds": to_mapping(context.run.thresholds),
            "data_sha256": package.data_sha256(context),
            "gate": to_mapping(record.gate),
            "audit_version": audit.audit_version(context),
            "audit_engine": asdict(current_engine(context)),
            "audit": package.audit_figures(self.base.results(end.model), results),
            "provenance": dict(self.release.provenance),
            "code": code_version(),
        }


def withholding_reasons(context: Context) -> tuple[str, ...]:
    """Return why no checkpoint of the run is released: some checks run on the last model alone."""
    later, shown = context.run.further_tuning.steps > 0, agent.decides(context)
    asked = (
        *(["asked again after a further fine-tuning"] if later else []),
        *(["shown to the auditing agent"] if shown else []),
    )
    return tuple(f"Only the last model is {each}, so checkpoints are not released." for each in asked)


def _is_released(record: CheckpointRecord) -> bool:
    return record.gate is not None and record.gate.decision in package.RELEASED


def _describe_asking(suites: Sequence[Suite], end: EpochEnd) -> str:
    """Return a phrase on the prompts that are asked at the end of an epoch."""
    attacks = sum(len(each.prompts) for each in suites if each.kind in ATTACKS)
    others = sum(len(each.prompts) for each in suites) - attacks
    counts = [f"{attacks:,} attack{'' if attacks == 1 else 's'}"] if attacks else []
    counts += [f"{others:,} other prompt{'' if others == 1 else 's'}"] if others else []
    return f"asking {' and '.join(counts)} at the end of epoch {end.epoch} of {end.total_steps * end.epoch // end.step}"


def _never() -> bool:
    return False


def _part(suite: Suite, limit: int) -> Suite:
    """Return the suite with at most `limit` of its prompts, evenly spaced."""
    return replace(suite, prompts=tuple(sample(suite.prompts, limit)))
