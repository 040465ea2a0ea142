"""What a worker hands over at the end of a job: an adapter, or the results of the audit that it did not pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.db.tables import Job
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
    """What is kept of a job whose audit did not pass."""

    message: str
    trained_tokens: int
    result_files: list[str]
    safety: SafetySummary
    report_key: str
    audit_results: list[AuditRow] = field(default_factory=list)
    held: HeldArchive | None = None  # None: the adapter is gone


def fine_tuned_model(job: Job) -> str:
    """OpenAI's form: ft:{base}:{organization}:{suffix}:{id}."""
    return f"ft:{job.model}:{job.project_id}:{job.suffix or ''}:{job.id.removeprefix('ftjob-')[:12]}"
