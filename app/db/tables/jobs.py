"""Fine-tuning jobs: what was asked, where each stands, what came out, and what was erased."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Enum, ForeignKey, Index, false
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Json, new_id, utc_now
from app.db.tables.job_records import (
    Adapter,
    JobError,
    LastFailure,
    Progress,
    RecipeJson,
    ResolvedJson,
    ResumeState,
    SafetySummary,
)
from app.db.tables.job_spec import JobSpec, JobSpecColumn
from app.db.tables.stage_costs import StageCosts


class JobStatus(StrEnum):
    """OpenAI's statuses; `app.jobs.transitions` says how a job goes from one to another."""

    validating_files = "validating_files"  # no job takes it: files are validated when they are uploaded
    queued = "queued"  # waits for a worker, perhaps not for the first time
    running = "running"  # a worker holds its lease; `Job.phase` says what it does
    paused = "paused"  # waits until its owner resumes it
    succeeded = "succeeded"  # its adapter is released
    failed = "failed"  # `Job.error` says why
    cancelled = "cancelled"  # its owner has ended it


TERMINAL = frozenset({JobStatus.succeeded, JobStatus.failed, JobStatus.cancelled})


def told_status(status: JobStatus, cancel_requested_at: datetime | None) -> JobStatus:
    """Return what a job's owner is told: it is cancelled once they have cancelled it, and never anything else.

    `status` follows when its worker has stopped.
    """
    is_stopping = status == JobStatus.running and cancel_requested_at is not None
    return JobStatus.cancelled if is_stopping else status


class Job(Base):
    """One fine-tuning run: what was asked, where it stands, what came out."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_jobs_created_at_id", "created_at", "id"),  # of all projects, as the provider lists them
        # A project's queue in its whole order, so that a claim sorts nothing; since when a project was not served.
        Index("ix_jobs_status_tenant_id_priority_created_at_id", "status", "tenant_id", "priority", "created_at", "id"),
        Index("ix_jobs_tenant_id_started_at", "tenant_id", "started_at"),
        Index("ix_jobs_tenant_id_fine_tuned_model", "tenant_id", "fine_tuned_model"),  # a model by its name
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("ftjob-"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    # What was asked; never changes.
    model: Mapped[str]
    training_file: Mapped[str]
    validation_file: Mapped[str | None]
    suffix: Mapped[str | None]
    job_metadata: Mapped[dict[str, str] | None]
    recipe: Mapped[RecipeJson] = mapped_column(Json)
    spec: Mapped[JobSpec] = mapped_column(JobSpecColumn)
    request_hash: Mapped[str]

    priority: Mapped[int] = mapped_column(default=0)  # within its project; the lowest is taken first
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of a GPU that it needs at least; None: not known
    shared_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # of them, by several GPUs

    # Where it stands.
    status: Mapped[JobStatus] = mapped_column(Enum(JobStatus, native_enum=False, length=16), default=JobStatus.queued)
    phase: Mapped[str] = mapped_column(default="validate")
    progress: Mapped[Progress | None] = mapped_column(Json)
    resolved: Mapped[ResolvedJson | None] = mapped_column(Json)
    warnings: Mapped[list[str] | None]
    error: Mapped[JobError | None] = mapped_column(Json)

    # Who works on it. The token only ever grows; a write under an older one is refused.
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int] = mapped_column(default=3)
    lease_token: Mapped[int] = mapped_column(BigInteger, default=0)
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[float | None]  # Unix seconds by the database's clock
    run_after: Mapped[float] = mapped_column(default=0.0)  # likewise
    seen_at: Mapped[float | None]  # likewise; until when `gpu_seconds` is counted
    gpu_seconds: Mapped[float] = mapped_column(default=0.0)  # with a worker, all attempts together
    gpu_seconds_before: Mapped[float] = mapped_column(default=0.0, server_default="0")  # of those before this attempt
    deadline_at: Mapped[float | None] = mapped_column(index=True)  # likewise; set when it starts
    cancel_requested_at: Mapped[datetime | None]
    audits_last: Mapped[bool] = mapped_column(default=False, server_default=false())  # before it is cancelled
    pause_requested_at: Mapped[datetime | None]
    last_failure: Mapped[LastFailure | None] = mapped_column(Json)
    attempt_base: Mapped[int] = mapped_column(default=0, server_default="0")  # attempts before it last came further
    furthest_step: Mapped[int | None]  # of all resume states that it ever had
    waits: Mapped[int] = mapped_column(default=0, server_default="0")  # in a row, for what is around it
    stops: Mapped[int] = mapped_column(default=0, server_default="0")  # counted attempts since it last came further
    waiting_for: Mapped[str | None]  # what keeps a running job from computing; its GPU time is not counted meanwhile
    launch_reason: Mapped[str | None]  # why the launcher's cluster does not start it, as of its last look
    avoids: Mapped[str | None]  # the worker that gave it back for a reason of its own,
    avoids_until: Mapped[float | None]  # and until when; Unix seconds by the database's clock
    checkpoint: Mapped[ResumeState | None] = mapped_column(Json)
    stage_costs: Mapped[StageCosts | None] = mapped_column(Json)  # of all stages that have ended, in all attempts

    # What came out; set in the transaction that publishes.
    fine_tuned_model: Mapped[str | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    result_files: Mapped[list[str] | None]
    adapter: Mapped[Adapter | None] = mapped_column(Json)
    safety: Mapped[SafetySummary | None] = mapped_column(Json)
    report_key: Mapped[str | None]

    @property
    def told_status(self) -> JobStatus:
        """The status that its owner is told."""
        return told_status(self.status, self.cancel_requested_at)


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
    data: Mapped[dict[str, object] | None]


class JobMetric(Base):
    """One training step's numbers, flat: `loss/task`, `loss/safe`, `spag/alpha`, ..."""

    __tablename__ = "job_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[dict[str, float | None]] = mapped_column(Json)


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


class IdempotencyKey(Base):
    """The first answer to a request that carried an `Idempotency-Key`."""

    __tablename__ = "idempotency_keys"

    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    job_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class DeletedModel(Base):
    """A fine-tuned model that its owner has deleted; the job that made it stays as it ended."""

    __tablename__ = "deleted_models"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    deleted_at: Mapped[datetime] = mapped_column(default=utc_now)


class SweptJob(Base):
    """An ended job whose abandoned attempts are gone from storage."""

    __tablename__ = "swept_jobs"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    swept_at: Mapped[datetime] = mapped_column(default=utc_now)


class Tombstone(Base):
    """What stays of an erased job: how it ended, what it used, and digests. No job's row goes without one."""

    __tablename__ = "tombstones"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    erased_at: Mapped[datetime] = mapped_column(default=utc_now)
    status: Mapped[str]
    gpu_seconds: Mapped[float] = mapped_column(default=0.0)
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    digests: Mapped[dict[str, str | None]] = mapped_column(Json)
    deleted_files: Mapped[list[str] | None]  # that were erased with it; None where an older version has erased it
