"""The database schema: who may call, what they uploaded, what was asked, where it stands, what came out."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from secrets import token_hex
from typing import Any

from sqlalchemy import BigInteger, Enum, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base as Base


def new_id(prefix: str) -> str:
    """An id that cannot be guessed: 96 random bits."""
    return f"{prefix}{token_hex(12)}"


def utc_now() -> datetime:
    return datetime.now(UTC)


class JobStatus(StrEnum):
    """OpenAI's set; the finer state is `Job.phase`."""

    validating_files = "validating_files"
    queued = "queued"
    running = "running"
    paused = "paused"
    succeeded = "succeeded"
    failed = "failed"
    cancelled = "cancelled"


TERMINAL = frozenset({JobStatus.succeeded, JobStatus.failed, JobStatus.cancelled})


class Tenant(Base):
    """An organisation: everything a customer owns carries its id."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("org-"))
    name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ApiKey(Base):
    """A key is shown once; only its SHA-256 is kept (256 random bits need no slow hash)."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("key_"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]
    owner: Mapped[str | None]  # the person who holds it
    prefix: Mapped[str] = mapped_column(index=True)
    digest: Mapped[str] = mapped_column(unique=True)
    scopes: Mapped[list[Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]  # to five minutes


class File(Base):
    """An uploaded or produced file; its bytes live in storage under `storage_key`."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant_id_created_at", "tenant_id", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("file-"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    storage_key: Mapped[str]
    status: Mapped[str]  # processed | error
    status_details: Mapped[str | None]
    rows: Mapped[int | None]
    problems: Mapped[list[Any] | None]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None]


class BaseModelEntry(Base):
    """A base model that the provider offers; customers name the alias only."""

    __tablename__ = "base_models"

    alias: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str]  # a local folder or a hub id
    revision: Mapped[str | None]
    learning_rate: Mapped[float | None]
    allow_full_fine_tuning: Mapped[bool] = mapped_column(default=False)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Corpus(Base):
    """A version of a safety pool or of an audit suite; the newest of a name that is not deleted is the current one.

    `kind` is `pool`, or for suites what a right answer is: `harmful` (refuse), `benign` (comply), `utility` (`answer`).
    """

    __tablename__ = "corpora"
    __table_args__ = (UniqueConstraint("kind", "name", "version"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("corpus-"))
    kind: Mapped[str]
    name: Mapped[str]
    version: Mapped[int]
    rows: Mapped[int]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    storage_key: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    deleted_at: Mapped[datetime | None]  # its number is not given out again


class Job(Base):
    """One fine-tuning run: what was asked, where it stands, what came out."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_tenant_id_created_at", "tenant_id", "created_at"),
        # A tenant's queue in its whole order, so that a claim sorts nothing; since when a tenant was not served.
        Index("ix_jobs_status_tenant_id_priority_created_at_id", "status", "tenant_id", "priority", "created_at", "id"),
        Index("ix_jobs_tenant_id_started_at", "tenant_id", "started_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("ftjob-"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    # What was asked; never changes.
    model: Mapped[str]
    training_file: Mapped[str]
    validation_file: Mapped[str | None]
    suffix: Mapped[str | None]
    job_metadata: Mapped[dict[str, Any] | None]
    recipe: Mapped[dict[str, Any]]  # spard.config.Recipe as JSON
    spec: Mapped[dict[str, Any]]  # model source and revision, pool and suites (id, sha256, storage_key), policy, files
    request_hash: Mapped[str]

    priority: Mapped[int] = mapped_column(default=0)  # within its tenant; the lowest is taken first

    # Where it stands.
    status: Mapped[JobStatus] = mapped_column(Enum(JobStatus, native_enum=False, length=16), default=JobStatus.queued)
    phase: Mapped[str] = mapped_column(default="validate")
    progress: Mapped[dict[str, Any] | None]  # percent, step, total_steps, eta_seconds
    resolved: Mapped[dict[str, Any] | None]  # spard.config.Resolved as JSON
    warnings: Mapped[list[Any] | None]
    error: Mapped[dict[str, Any] | None]

    # Who works on it. The token only ever grows; a write under an older one is refused.
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int] = mapped_column(default=3)
    lease_token: Mapped[int] = mapped_column(BigInteger, default=0)
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[float | None]  # Unix seconds by the database's clock
    run_after: Mapped[float] = mapped_column(default=0.0)  # likewise
    seen_at: Mapped[float | None]  # likewise; until when `gpu_seconds` is counted
    gpu_seconds: Mapped[float] = mapped_column(default=0.0)  # with a worker, all attempts together
    deadline_at: Mapped[float | None] = mapped_column(index=True)  # likewise; set when it starts
    cancel_requested_at: Mapped[datetime | None]
    pause_requested_at: Mapped[datetime | None]
    last_failure: Mapped[dict[str, Any] | None]  # what went wrong and where; the same twice is the job's own fault
    checkpoint: Mapped[dict[str, Any] | None]  # step, storage prefix, manifest sha256: the newest durable one

    # What came out; set in the transaction that publishes.
    fine_tuned_model: Mapped[str | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    result_files: Mapped[list[Any] | None]
    adapter: Mapped[dict[str, Any] | None]  # storage key, sha256, bytes of the archive
    safety: Mapped[dict[str, Any] | None]  # the audit's summary: asr, harmfulness_score, over_refusal, utility, gate
    report_key: Mapped[str | None]


class JobEvent(Base):
    """What a person follows; `seq` orders events within a job."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(default=lambda: new_id("ftevent-"), unique=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    level: Mapped[str]  # info | warn | error
    type: Mapped[str]  # message | metrics | moderation_checks
    message: Mapped[str]
    data: Mapped[dict[str, Any] | None]


class JobMetric(Base):
    """One training step's numbers, flat: `loss/task`, `loss/safe`, `spag/alpha`, ..."""

    __tablename__ = "job_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[dict[str, Any]]


class AuditResult(Base):
    """One suite measured on one subject, so that jobs can be compared by SQL."""

    __tablename__ = "audit_results"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    suite: Mapped[str] = mapped_column(primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)  # base | adapter
    kind: Mapped[str]
    judge: Mapped[str]
    n: Mapped[int]  # scored
    n_unscored: Mapped[int]
    hits: Mapped[int]  # attacks that succeeded, refusals of benign prompts, right answers
    rate: Mapped[float | None]
    ci_low: Mapped[float | None]
    ci_high: Mapped[float | None]
    mean_harmfulness: Mapped[float | None]


class Outbox(Base):
    """Wake-ups to send after the commit that made them; losing one costs a poll interval, not a job."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    topic: Mapped[str]
    payload: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    sent_at: Mapped[datetime | None] = mapped_column(index=True)


class IdempotencyKey(Base):
    """The first answer to a request that carried an `Idempotency-Key`."""

    __tablename__ = "idempotency_keys"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    job_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
