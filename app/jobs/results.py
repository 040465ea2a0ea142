"""Define what a worker submits at the end of a job, and name the job's model and missing report."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.db.tables import Job, JobStatus
from app.db.tables.job_records import Adapter, AuditRow, HeldArchive, SafetySummary


@dataclass(frozen=True, slots=True)
class Publication:
    """The adapter and the results of a job whose audit passed."""

    fine_tuned_model: str
    trained_tokens: int
    result_files: list[str]
    adapter: Adapter
    safety: SafetySummary
    report_key: str
    audit_results: list[AuditRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rejection:
    """The results of a job whose audit did not pass."""

    message: str
    trained_tokens: int
    result_files: list[str]
    safety: SafetySummary
    report_key: str
    audit_results: list[AuditRow] = field(default_factory=list)
    held: HeldArchive | None = None  # None: the adapter was not kept


def missing_report(job: Job) -> str:
    """Explain why a job has no safety report, and whether it may still get one."""
    if job.status == JobStatus.failed and job.error:
        why = job.error["message"].rstrip(".")
        return (
            f"Job {job.id} failed before its audit, with {job.error['code']}, so that it has no safety report: {why}."
        )
    if job.status == JobStatus.cancelled:
        return f"Job {job.id} was cancelled before its audit and has no safety report."
    return f"Job {job.id} is {job.public_status} and has no safety report yet; `spard jobs watch` shows how far it is."


def fine_tuned_model(job: Job) -> str:
    """Return the model's name in OpenAI's form: ft:{base}:{organization}:{suffix}:{id}."""
    return f"ft:{job.model}:{job.project_id}:{job.suffix or ''}:{job.id.removeprefix('ftjob-')[:12]}"
