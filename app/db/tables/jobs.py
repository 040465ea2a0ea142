"""Tables of fine-tuning jobs: request, state, results, checkpoints, and what stays of erased jobs.

Also of what people decide about results, waivers of held-back adapters and labels of replies; of the workers, as they
report themselves; and of wake-ups, which are sent after the commit that made them. The texts of labeled replies stay in
the transcripts of their jobs and are deleted with them.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Enum, ForeignKey, Index, UniqueConstraint, false
from sqlalchemy.orm import Mapped, mapped_column
from typing_extensions import TypedDict

from app.db.base import Base, Json, new_id, utc_now
from app.db.session import timestamp
from app.db.tables.job_records import (
    Adapter,
    CheckpointSafety,
    JobError,
    LastFailure,
    Progress,
    RecipeJson,
    ResolvedJson,
    ResumeState,
    SafetySummary,
)
from app.db.tables.job_spec import JobSpec, JobSpecColumn

WHOLE_JOB = 0  # the `step` of a job's model, as opposed to a checkpoint
KEPT_CHECKPOINTS = 3  # checkpoints kept per job, as at OpenAI; includes the final one
EPOCH, FINAL = "epoch", "final"  # kinds of checkpoints
PRESENCE_EVERY_S = 30.0  # the longest time between two writes of a running worker's `seen_at`
# A worker that was seen within this time is alive. The limit does not depend on the length of leases, which providers
# set: a long lease would make a worker that is gone look alive, or one that is there look gone.
ALIVE_S = 3 * PRESENCE_EVERY_S


class LaterAudit(Base):
    """One later audit of a released model, or of its checkpoint at a step; the newest decided one is in force.

    A job of the provider's own project runs it. `record` holds the signed bytes.
    """

    __tablename__ = "later_audits"
    __table_args__ = (UniqueConstraint("job_id", "step", "round"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("audit_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int] = mapped_column(default=WHOLE_JOB)
    round: Mapped[int]  # 1 for the first later audit of the model
    audit_version: Mapped[int]
    audit_job_id: Mapped[str | None] = mapped_column(index=True)  # None: it could not be run
    asked_by: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    decided_at: Mapped[datetime | None] = mapped_column(index=True)
    decision: Mapped[str | None]  # pass | fail | inconclusive
    reasons: Mapped[list[str] | None]
    record: Mapped[str | None]
    signature: Mapped[dict[str, str] | None]


# Types of the stored costs of a job's stages.


class StageCost(TypedDict):
    """The seconds of a stage, and its units of work (`spard.pipeline.costs`)."""

    seconds: float
    units: int


StageCosts = dict[str, StageCost]


class JobStatus(StrEnum):
    """OpenAI's statuses; `app.jobs.transitions` defines the allowed changes."""

    validating_files = "validating_files"  # unused: files are validated when they are uploaded
    queued = "queued"  # waits for a worker, perhaps not for the first time
    running = "running"  # a worker holds its lease; `Job.phase` says what it does
    paused = "paused"  # waits until its owner resumes it
    succeeded = "succeeded"  # its adapter is released
    failed = "failed"  # `Job.error` says why
    cancelled = "cancelled"  # its owner has ended it


TERMINAL = frozenset({JobStatus.succeeded, JobStatus.failed, JobStatus.cancelled})


def public_status(status: JobStatus, cancel_requested_at: datetime | None) -> JobStatus:
    """Return the status that the API shows: `cancelled` from the moment the owner cancels the job.

    The stored `status` follows when the worker has stopped.
    """
    is_stopping = status == JobStatus.running and cancel_requested_at is not None
    return JobStatus.cancelled if is_stopping else status


class Job(Base):
    """One fine-tuning job: its request, state and results."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_jobs_created_at_id", "created_at", "id"),  # the provider's list over all projects
        # First a project's queue in order, so that a claim needs no sort; second when a project was last served.
        Index("ix_jobs_status_tenant_id_priority_created_at_id", "status", "tenant_id", "priority", "created_at", "id"),
        Index("ix_jobs_tenant_id_started_at", "tenant_id", "started_at"),
        Index("ix_jobs_tenant_id_fine_tuned_model", "tenant_id", "fine_tuned_model"),  # finds a model by name
        Index("ix_jobs_model_finished_at", "model", "finished_at"),  # a base model's latest audits
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("ftjob-"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    # The request; never changes.
    model: Mapped[str]
    training_file: Mapped[str]
    validation_file: Mapped[str | None]
    suffix: Mapped[str | None]
    job_metadata: Mapped[dict[str, str] | None]
    recipe: Mapped[RecipeJson] = mapped_column(Json)
    spec: Mapped[JobSpec] = mapped_column(JobSpecColumn)
    request_hash: Mapped[str]

    priority: Mapped[int] = mapped_column(default=0)  # within its project; the lowest is taken first
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # least GPU memory that it needs; None: unknown
    shared_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # its part that is sharded

    # Its state.
    status: Mapped[JobStatus] = mapped_column(Enum(JobStatus, native_enum=False, length=16), default=JobStatus.queued)
    phase: Mapped[str] = mapped_column(default="validate")
    progress: Mapped[Progress | None] = mapped_column(Json)
    resolved: Mapped[ResolvedJson | None] = mapped_column(Json)
    warnings: Mapped[list[str] | None]
    error: Mapped[JobError | None] = mapped_column(Json)

    # Its worker. The token only grows; a write with an older token is refused.
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int] = mapped_column(default=3)
    lease_token: Mapped[int] = mapped_column(BigInteger, default=0)
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[float | None]  # Unix seconds by the database's clock
    run_after: Mapped[float] = mapped_column(default=0.0)  # likewise
    seen_at: Mapped[float | None]  # likewise; `gpu_seconds` is counted up to here
    gpu_seconds: Mapped[float] = mapped_column(default=0.0)  # over all attempts
    gpu_seconds_before: Mapped[float] = mapped_column(default=0.0, server_default="0")  # the part of earlier attempts
    leased_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")  # of this attempt, up to `seen_at`
    deadline_at: Mapped[float | None] = mapped_column(index=True)  # likewise by its clock; set when it starts
    cancel_requested_at: Mapped[datetime | None]
    audits_last: Mapped[bool] = mapped_column(default=False, server_default=false())  # before it is cancelled
    pause_requested_at: Mapped[datetime | None]
    last_failure: Mapped[LastFailure | None] = mapped_column(Json)
    attempts_before_progress: Mapped[int] = mapped_column(
        "attempt_base", default=0, server_default="0"
    )  # attempts before its last progress
    furthest_step: Mapped[int | None]  # over all of its resume states
    waits: Mapped[int] = mapped_column(default=0, server_default="0")  # consecutive failures of the surroundings
    stops: Mapped[int] = mapped_column(default=0, server_default="0")  # counted attempts since its last progress
    waiting_for: Mapped[str | None]  # why a running job does not compute; this time does not count as GPU time
    launch_reason: Mapped[str | None]  # why the launcher's cluster does not start it, as last seen
    excluded_worker_id: Mapped[str | None] = mapped_column(
        "avoids"
    )  # a worker that gave it back for a reason of its own
    excluded_until: Mapped[float | None] = mapped_column("avoids_until")  # Unix seconds by the database's clock
    checkpoint: Mapped[ResumeState | None] = mapped_column(Json)
    stage_costs: Mapped[StageCosts | None] = mapped_column(Json)  # of all finished stages, over all attempts

    # Its results; set in the transaction that publishes them.
    fine_tuned_model: Mapped[str | None]
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    result_files: Mapped[list[str] | None]
    adapter: Mapped[Adapter | None] = mapped_column(Json)
    safety: Mapped[SafetySummary | None] = mapped_column(Json)
    report_key: Mapped[str | None]

    @property
    def public_status(self) -> JobStatus:
        """The status that the API shows to the owner."""
        return public_status(self.status, self.cancel_requested_at)


class JobEvent(Base):
    """An event for people to follow; `seq` orders events within a job."""

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
    """One training step's metrics by name: `loss/task`, `loss/safe`, `spag/alpha`, ..."""

    __tablename__ = "job_metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[dict[str, float | None]] = mapped_column(Json)


class AuditResult(Base):
    """One suite's result for the base model or the adapter (`subject`), as columns, so that SQL can compare jobs."""

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
    """The job that the first request with an `Idempotency-Key` made."""

    __tablename__ = "idempotency_keys"

    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_hash: Mapped[str]
    job_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=timestamp())


class DeletedModel(Base):
    """A fine-tuned model that its owner has deleted; its job is unchanged."""

    __tablename__ = "deleted_models"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    deleted_at: Mapped[datetime] = mapped_column(default=utc_now)


class SweptJob(Base):
    """An ended job whose abandoned attempts were deleted from storage."""

    __tablename__ = "swept_jobs"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    swept_at: Mapped[datetime] = mapped_column(default=utc_now)


class Tombstone(Base):
    """What stays of an erased job: outcome, usage and digests. Every erased job leaves one."""

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
    deleted_files: Mapped[list[str] | None]  # files erased with it; None if an older version erased it


class JobCheckpoint(Base):
    """The checkpoint of an epoch with its metrics, and its archive if its audit released it and it still exists.

    The `final` one, by default of the last epoch, has no archive of its own: its archive is the job's adapter. A row
    without a kind was saved by a timer in a version before 0.3, and is only a name with metrics.
    """

    __tablename__ = "job_checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(default=lambda: new_id("ftckpt_"), unique=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    metrics: Mapped[dict[str, float | None]] = mapped_column(Json)
    kind: Mapped[str | None]
    safety: Mapped[CheckpointSafety | None] = mapped_column(Json)  # None: it was not audited
    storage_key: Mapped[str | None]
    sha256: Mapped[str | None]
    bytes: Mapped[int | None] = mapped_column(BigInteger)


class CheckpointPermission(Base):
    """A project that may see a checkpoint, as OpenAI's API records it."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (UniqueConstraint("job_id", "step", "project_id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("cp_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    project_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class WorkerRow(Base):
    """A worker process; its row is deleted when it stops, or pruned later if it was killed."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(primary_key=True)  # as in `Job.lease_owner`
    host: Mapped[str]
    version: Mapped[str]
    devices: Mapped[list[str]]  # GPU names as the driver reports them; empty without a GPU
    troubles: Mapped[list[str]]  # what keeps it from jobs: disk, gpu, judge, models, storage
    started_at: Mapped[datetime] = mapped_column(default=utc_now)
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of its smallest GPU; None without one
    gpus: Mapped[int] = mapped_column(default=1, server_default="1")  # over which a job's model is sharded
    seen_at: Mapped[float]  # Unix seconds by the database's clock


class Outbox(Base):
    """A wake-up to send after the commit that made it; losing one costs a poll interval, not a job."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    topic: Mapped[str]
    payload: Mapped[dict[str, object]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    sent_at: Mapped[datetime | None] = mapped_column(index=True)


class HeldAdapter(Base):
    """A signed archive that no route serves unless a waiver releases it."""

    __tablename__ = "held_adapters"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    storage_key: Mapped[str]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Waiver(Base):
    """A waiver, proposed by one admin key; in force once another key has approved it, until it expires."""

    __tablename__ = "waivers"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("waiver_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    reason: Mapped[str]
    expires_at: Mapped[datetime]
    proposed_by: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    approved_by: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"))
    approved_at: Mapped[datetime | None]
    record: Mapped[str | None]  # the signed bytes
    signature: Mapped[dict[str, str] | None]


class SampledReply(Base):
    """A drawn reply: the transcript `number` of a job.

    `stratum` and `population` are those of `spard.evaluation.calibration.labeling`; strata of two draws differ.
    """

    __tablename__ = "sampled_replies"
    __table_args__ = (UniqueConstraint("job_id", "number"), UniqueConstraint("model", "place"))

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("reply_"))
    model: Mapped[str]  # the base model's alias
    place: Mapped[int]  # order in which the replies of a model are shown, from 1
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int]
    stratum: Mapped[str]
    population: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ReplyLabel(Base):
    """One person's score of a reply, from 1 to 5; with `settles` it settles a disagreement."""

    __tablename__ = "reply_labels"

    reply_id: Mapped[str] = mapped_column(ForeignKey("sampled_replies.id"), primary_key=True)
    labeler: Mapped[str] = mapped_column(primary_key=True)  # the owner of the key, or the id of a key without one
    settles: Mapped[bool] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    score: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
