"""The package stage: writes metrics and the safety report, and the adapter if it is proved and may be released.

A clean process loads the saved adapter without our code and must reproduce the trained model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spard import distributed
from spard.config.run_spec import to_mapping
from spard.data.rows import Example, prompt_text
from spard.digests import file_sha256, write_manifest
from spard.evaluation.results import SuiteResult
from spard.models.adapters import save_adapter
from spard.pipeline import audit, checkpoint_records, embed, evidence, kept_figures, row_judging, select, task_check
from spard.pipeline.context import Context
from spard.pipeline.development import ending_record
from spard.pipeline.kept_figures import Transcript
from spard.pipeline.rows import Rows
from spard.pipeline.task_check import TaskReply
from spard.pipeline.train import TrainingResult, is_unfamiliar
from spard.release.archive import folder_name
from spard.release.figures import TRANSCRIPTS, ValidationLoss, count_lengths, metrics_csv, trigger_rate, triggered_steps
from spard.release.proof import PROMPTS, CleanProcess, Proof, Source, prove
from spard.release.records import AfterTuning, ComputeRecord
from spard.release.report import AuditResults, Decision, GateRecord, SafetyReport, Summary, summarize
from spard.release.task_check import TASK_REPLIES, TaskCheck
from spard.release.version import code_version
from spard.training.compute import Compute


def prove_and_report(
    context: Context, clean: CleanProcess | None, model: Any, adapter: Path, examples: Sequence[Example]
) -> Proof:
    """Prove the adapter in `adapter` and report the result; warn if an answer does not end.

    Raises `AdapterNotProved` unless the folder reproduces `model`.
    """
    proof = prove_adapter(context, clean, model, adapter, examples)
    context.report.event("The adapter loads with transformers and PEFT alone and is the one trained", asdict(proof))
    if not proof.ends:
        warning = f"The adapter's answer to the first training prompt did not end within {proof.tokens} tokens;"
        context.report.warning(f"{warning} give a limit when you serve it.")
    return proof


def prove_adapter(
    context: Context, clean: CleanProcess | None, model: Any, adapter: Path, examples: Sequence[Example]
) -> Proof:
    """Prove the adapter in `adapter` without reporting; `clean` is None except on rank 0.

    Raises `AdapterNotProved` unless the folder reproduces `model`.
    """
    context.report.activity("loading the adapter in a clean process, which proves it")
    source = Source(context.run.model, context.run.revision)
    prompts = [prompt_text(example) for example in examples[:PROMPTS]]
    return prove(clean, model, context.base, source, adapter, prompts, context.raise_if_stopped)


RELEASED: tuple[Decision, ...] = ("pass", "waived")
# Fields of the report, and of each suite's result, that the manifest repeats.
_FACTS = (
    *("job_id", "base_digest", "recipe", "resolved", "micro_batch_size", "thresholds", "data_sha256"),
    *("trained_tokens", "steps", "tau", "trigger_rate", "triggered_steps", "validation", "gate", "audit_version"),
    *("audit_engine", "embedder", "compute"),
)
_FIGURES = ("suite", "kind", "judge", "n", "unscored", "hits", "rate", "low", "high", "mean_harmfulness")


@dataclass(frozen=True, slots=True)
class Release:
    """The folder for the results of a run, and what is released and written.

    out           folder of metrics.csv, safety.json, adapter/ and, if they are kept, transcripts.jsonl and
                  task_replies.jsonl
    job_id        the service's id of the run
    waived        release the adapter whatever the gate decides
    keeps_failed  save the adapter even if the gate withholds it
    is_timed      include the seconds of each stage; without them equal runs write equal files
    provenance    the manifest's facts about the origin of everything
    """

    out: Path
    job_id: str | None = None
    waived: bool = False
    keeps_failed: bool = False
    is_timed: bool = True
    provenance: Mapping[str, object] = field(default_factory=dict)

    @property
    def adapter(self) -> Path:
        """The folder of the adapter's files and its manifest."""
        return self.out / "adapter"

    @property
    def safety(self) -> Path:
        """The file of the safety report, which is always written."""
        return self.out / "safety.json"

    @property
    def transcripts(self) -> Path:
        """The JSONL file of the last audit's prompts and replies, if the run keeps them."""
        return self.out / TRANSCRIPTS

    @property
    def task_replies(self) -> Path:
        """The file of the customer's requests that were asked of both models, where there are some."""
        return self.out / TASK_REPLIES


def run(
    context: Context,
    release: Release,
    rows: Rows,
    tuned: TrainingResult,
    measured: AuditResults,
    clean: CleanProcess | None,
) -> SafetyReport:
    """Write the results and return the safety report; a saved adapter is also proved and gets its manifest.

    Raises `AdapterNotProved` if a clean process does not reproduce the model from the saved adapter.
    """
    decision = "waived" if release.waived else measured.gate.decision
    summary = summarize(measured)
    context.report.event(summary.sentence(decision), to_mapping(summary), type="moderation_checks")
    context.report.stage("package")
    with context.time_stage("package"):
        heard = kept_figures.kept_transcripts(context)
        report = _with_figures(context, rows, _report(context, release, tuned, measured, summary), heard)
        check = _task_check(context, rows, tuned)
        report = replace(report, ending=ending_record(context, rows, tuned), task_check=check)
        report = replace(report, evidence=evidence.kept_record(context))
        if report.ending:
            context.report.event(report.ending.sentence, to_mapping(report.ending))
        _report_task(context, report)
        replies = task_check.kept_replies(context, rows.learning)
        is_first = distributed.rank() == 0
        if is_first:
            _write(release, tuned, report, heard)
            _write_task_replies(release, replies)
        if decision in RELEASED or release.keeps_failed:
            named, facts = folder_name(release.job_id), _manifest(release, report) if is_first else {}
            # All ranks call `save`, which gathers sharded weights; only rank 0 has facts to write.
            saved = save(context, tuned.trained.model, release.adapter, facts, named)
            proof = prove_and_report(context, clean, tuned.trained.model, release.adapter, rows.examples)
            if is_first:
                write_manifest(release.adapter, saved | {"proof": asdict(proof)})
    return report


def _task_check(context: Context, rows: Rows, tuned: TrainingResult) -> TaskCheck | None:
    """Return the check of the task, marked if the rows' text is unfamiliar to the base model; None without a check."""
    if rows.learning is None:
        return None
    # A run that starts from an adapter has measured that adapter's loss before the training, not the base model's.
    before = tuned.before if context.run.start_from is None else None
    return replace(rows.learning.check, is_unfamiliar=before is not None and is_unfamiliar(context, before.loss))


def _report_task(context: Context, report: SafetyReport) -> None:
    if report.task:
        told = f"The task: {report.task.headline} {report.task.figures or report.task.note}".strip()
        context.report.event(told, {name: report.to_json()[name] for name in ("task_check", "validation")})


def _write(release: Release, tuned: TrainingResult, report: SafetyReport, heard: Sequence[Transcript] | None) -> None:
    release.out.mkdir(parents=True, exist_ok=True)
    if heard is not None:
        release.transcripts.write_text("".join(json.dumps(each) + "\n" for each in heard))
    (release.out / "metrics.csv").write_text(metrics_csv(tuned.trained.metrics, tuned.after, tuned.released_step))
    release.safety.write_text(json.dumps(report.to_json(), indent=2) + "\n")


def _write_task_replies(release: Release, replies: Sequence[TaskReply]) -> None:
    """Write the customer's requests with both models' replies; a file of an earlier run in the folder is deleted."""
    release.task_replies.unlink(missing_ok=True)
    if replies:
        release.task_replies.write_text("".join(json.dumps(each) + "\n" for each in replies))


def save(context: Context, model: Any, folder: Path, facts: Mapping[str, object], called: str) -> dict[str, object]:
    """Write an adapter (the last one or a checkpoint's) to `folder`; return its manifest, with `facts` included.

    `called` is the top folder of its archive.
    """
    return save_adapter(model, context.base, context.public_name, folder, facts, context.system_prompt, called)


def audit_figures(
    base: Sequence[SuiteResult], adapter: Sequence[SuiteResult], later: AfterTuning | None = None
) -> dict[str, list[dict[str, object]]]:
    """Return the manifest's fields of each suite's results, for the base model and the adapter."""
    measured = {"base": base, "adapter": adapter}
    if later is not None:
        measured |= {"base_after_tuning": later.base, "adapter_after_tuning": later.adapter}
    return {
        who: [{name: getattr(each, name) for name in _FIGURES} for each in found] for who, found in measured.items()
    }


def data_sha256(context: Context) -> dict[str, str]:
    """Return the digests of the training file, the validation file and the pool."""
    run = context.run
    files = {"training": run.training_file, "validation": run.validation_file, "pool": run.pool}
    return {name: file_sha256(path) for name, path in files.items() if path}


def _with_figures(
    context: Context, rows: Rows, report: SafetyReport, heard: Sequence[Transcript] | None
) -> SafetyReport:
    """Add the data for plots and the number of transcripts to the report."""
    return replace(
        report,
        scores=kept_figures.kept_scores(context),
        rows_map=select.kept_map(context),
        lengths=count_lengths([row.longest for row in rows.task], context.limit),
        transcripts=None if heard is None else len(heard),
    )


def _report(
    context: Context, release: Release, tuned: TrainingResult, measured: AuditResults, summary: Summary
) -> SafetyReport:
    run, trained = context.run, tuned.trained
    decision = GateRecord.from_gate(measured.gate, is_waived=release.waived)
    return SafetyReport(
        job_id=release.job_id,
        base_model=context.public_name,
        base_digest=context.base.digest,
        recipe=to_mapping(run.recipe),
        resolved=tuned.resolved,
        micro_batch_size=tuned.recipe.micro_batch_size,
        memory_plan=tuned.plan.to_json() if tuned.plan else None,
        thresholds=run.thresholds,
        data_sha256=data_sha256(context),
        trained_tokens=trained.trained_tokens,
        steps=trained.steps,
        tau=trained.tau,
        trigger_rate=trigger_rate(trained.metrics),
        triggered_steps=triggered_steps(trained.metrics),
        validation=_validation(tuned),
        gate=decision,
        base=_without_marks(measured.base),
        adapter=_without_marks(measured.adapter),
        asr=summary.asr,
        harmfulness_score=summary.harmfulness_score,
        over_refusal=summary.over_refusal,
        utility=summary.utility,
        seconds=dict(context.seconds) if release.is_timed else {},
        selected=select.read_selected(context),
        safe_answers=select.kept_answers(context),
        risky_rows=select.kept_risks(context),
        checkpoints=checkpoint_records.epoch_records(context, tuned, summary, decision),
        row_signal=row_judging.read_row_signal_record(context),
        audit_version=audit.audit_version(context),
        replies={"base": _replies(measured.base), "adapter": _replies(measured.adapter)},
        asked=tuple(audit.audit_coverage(context)),
        after_tuning=_later(measured.after_tuning),
        agent=measured.agent,
        audit_engine=measured.engine,
        embedder=embed.kept_record(context),
        compute=_compute(trained.compute, is_timed=release.is_timed),
    )


def _compute(found: Compute | None, *, is_timed: bool) -> ComputeRecord | None:
    """Return the record of the training's operations and energy; the energy differs between equal runs."""
    if found is None:
        return None
    energy = {name: round(joules, 3) for name, joules in found.energy_j.items()} if is_timed else {}
    missing = found.energy_missing if is_timed else ()
    passes = found.operations, found.forward_tokens, found.backward_tokens
    return ComputeRecord(*passes, energy_j=energy, energy_missing=missing)


def _validation(tuned: TrainingResult) -> dict[str, ValidationLoss]:
    losses = {"base": tuned.before, "adapter": tuned.after}
    return {name: ValidationLoss(found.loss, found.accuracy, found.tokens) for name, found in losses.items() if found}


def _without_marks(results: Sequence[SuiteResult]) -> tuple[SuiteResult, ...]:
    """Remove the marks of which prompts were hit: customers read reports, and suites are the provider's secret."""
    return tuple(replace(each, marks=None) for each in results)


def _later(found: AfterTuning | None) -> AfterTuning | None:
    return found and replace(found, base=_without_marks(found.base), adapter=_without_marks(found.adapter))


def _replies(results: Sequence[SuiteResult]) -> int:
    return sum(each.n + each.unscored for each in results)


def _manifest(release: Release, report: SafetyReport) -> dict[str, object]:
    """Return the manifest's fields beside the digests of the adapter's files."""
    shown = report.to_json()
    acted = report.row_signal is not None and (report.row_signal.dropped or report.row_signal.defended)
    sometimes = [name for name in ("ending", "memory_plan", "agent", "task_check", "evidence") if shown[name]]
    more = [*(["row_signal"] if acted else []), *sometimes]
    return {name: shown[name] for name in (*_FACTS, *more)} | {
        "audit": audit_figures(report.base, report.adapter, report.after_tuning),
        "selected_rows": None if report.selected is None else list(report.selected.indices),
        "safety_sha256": file_sha256(release.safety),
        "provenance": dict(release.provenance),
        "code": code_version(),
    }
