"""How a job's work can end: with an adapter for its customer, or with the measurements that kept it back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.models import Job


@dataclass(frozen=True, slots=True)
class Publication:
    """What a job whose audit passed brings into the world."""

    fine_tuned_model: str
    trained_tokens: int
    result_files: list[str]
    adapter: dict[str, Any]
    safety: dict[str, Any]
    report_key: str
    audit_results: list[dict[str, Any]] = field(default_factory=list)  # columns of AuditResult but the job's id


@dataclass(frozen=True, slots=True)
class Rejection:
    """What is kept of a job whose adapter the gate did not let out."""

    message: str
    trained_tokens: int
    result_files: list[str]
    safety: dict[str, Any]
    report_key: str
    audit_results: list[dict[str, Any]] = field(default_factory=list)
    held: dict[str, Any] | None = None  # columns of HeldAdapter but the job's id; None: the adapter is gone


def fine_tuned_model(job: Job) -> str:
    """OpenAI's form: ft:{base}:{organisation}:{suffix}:{id}."""
    return f"ft:{job.model}:{job.tenant_id}:{job.suffix or ''}:{job.id.removeprefix('ftjob-')[:12]}"
