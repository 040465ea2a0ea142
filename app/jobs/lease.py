"""Lease jobs to workers: claim, heartbeat, write results, give back; and take back the jobs of lost workers.

A claim raises the job's `lease_token`, and every write of a worker names its token: the write is refused, with False,
if the token is not the newest. Times are the database's. Writes of a worker do not commit: the caller's transaction
holds the change and its event together.

Any number of processes may run the loop that hands back the jobs of lost workers and fails overdue jobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from threading import Event
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, Engine, and_, delete, func, insert
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from app.db import now, timestamp, transaction
from app.db.tables import AuditResult, HeldAdapter, Job, JobMetric, JobStatus
from app.db.tables.job_records import (
    Adapter,
    AuditRow,
    HeldArchive,
    JobError,
    Progress,
    ResolvedJson,
    ResumeState,
    SafetySummary,
)
from app.db.tables.jobs import StageCosts
from app.help import job_cure
from app.jobs import events, scheduling, transitions
from app.jobs.needs import Room
from app.ops.lifecycle import repeat
from app.webhooks.delivery import announce_audit

log = logging.getLogger(__name__)

OVERDUE = transitions.error_object(
    "deadline_exceeded", f"The job took longer than the provider allows. {job_cure('deadline_exceeded')}"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """One worker's right to one job, valid as long as `token` is the job's newest."""

    job_id: str
    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to a heartbeat: whether and why the worker has to stop."""

    cancel_requested: bool = False
    pause_requested: bool = False
    is_overdue: bool = False
    audits_last: bool = False  # before it is cancelled


class Columns(TypedDict, total=False):
    """The columns that a worker may write while it runs a job."""

    phase: str
    progress: Progress
    resolved: ResolvedJson
    warnings: list[str]
    checkpoint: ResumeState
    stage_costs: StageCosts
    trained_tokens: int


def claim(
    session: Session,
    owner: str,
    lease_s: float,
    max_run_s: float | None = None,
    lacks: Collection[str] = (),
    room: Room = scheduling.ANY,
    only: ColumnElement[bool] | None = None,
) -> Claim | None:
    """Claim the next job for the worker `owner`, or return None if no job may start.

    Exactly one worker gets each job. The lease lasts `lease_s` seconds. A job without a deadline gets one `max_run_s`
    seconds from now. The worker cannot load base models of the sources in `lacks` and has `room` on its GPUs; jobs that
    need more are skipped. With `only`, the first job that matches this condition is claimed, without regard to the
    order of projects.
    """
    # Another worker may take a project's last job between the two queries; then the next project is tried.
    for which in scheduling.turns(session) if only is None else (only,):
        row = transitions.change_status(
            session,
            Job.id == scheduling.select_first(which, owner, lacks, room).scalar_subquery(),
            JobStatus.queued,
            JobStatus.running,
            returning=(Job.lease_token, Job.attempt, Job.attempts_before_progress, Job.max_attempts),
            started_at=func.coalesce(Job.started_at, timestamp()),
            attempt=Job.attempt + 1,
            lease_token=Job.lease_token + 1,
            lease_owner=owner,
            launch_reason=None,
            lease_expires_at=now() + lease_s,
            seen_at=now(),
            gpu_seconds_before=Job.gpu_seconds,
            leased_seconds=0.0,
            # A retry keeps the deadline of the first start.
            deadline_at=func.coalesce(Job.deadline_at, now() + max_run_s if max_run_s else None),
        )
        if row:
            again = transitions.attempt_suffix(row.attempt, row.attempts_before_progress, row.max_attempts)
            events.append(session, row.id, "info", "message", f"Fine-tuning job started{again}")
            return Claim(row.id, row.lease_token, row.attempt)
    return None


def heartbeat(
    session: Session, claim: Claim, lease_s: float, computed_s: float | None = None, waits: str = ""
) -> Pulse | None:
    """Extend the lease by `lease_s` seconds; return None if the lease is lost, and the worker must stop at once.

    `computed_s` is the number of seconds of the whole attempt that count as GPU time, by default all; `waits` says what
    the worker waits for.
    """
    is_overdue = and_(Job.deadline_at.is_not(None), Job.deadline_at < now())
    row = session.execute(
        sql_update(Job)
        .where(_is_held(claim))
        .values(lease_expires_at=now() + lease_s, waiting_for=waits or None, **transitions.time_computed(computed_s))
        .returning(Job.cancel_requested_at, Job.pause_requested_at, is_overdue, Job.audits_last)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    return None if row is None else Pulse(row[0] is not None, row[1] is not None, bool(row[2]), row[3])


def update(session: Session, claim: Claim, **columns: Unpack[Columns]) -> bool:
    """Write the job's progress columns; return False if the lease is lost."""
    kept = columns.get("checkpoint")
    if kept and (job := _lock_held(session, claim)):
        transitions.note_kept(job, kept)
        session.flush()
    written = sql_update(Job).where(_is_held(claim)).values(**columns).returning(Job.id)
    return session.scalar(written.execution_options(synchronize_session="fetch")) is not None


def holds(session: Session, claim: Claim) -> bool:
    """Return True if the claim still holds the job, and lock the job's row until the transaction ends.

    While it is locked, no other worker can claim the job.
    """
    return _lock_held(session, claim) is not None


def record_metrics(session: Session, claim: Claim, rows: Mapping[int, Mapping[str, float | None]]) -> bool:
    """Store metrics, given as a mapping from step to names and values; return False if the lease is lost.

    A step that is trained again after a restart replaces its row.
    """
    if not holds(session, claim):
        return False
    of_job = JobMetric.job_id == claim.job_id
    # After a restart, the steps since the last resume state are trained and reported again.
    session.execute(delete(JobMetric).where(of_job, JobMetric.step.in_(rows)))
    if rows:
        session.execute(
            insert(JobMetric), [{"job_id": claim.job_id, "step": step, "data": data} for step, data in rows.items()]
        )
    return True


def publish(session: Session, claim: Claim, result: Publication) -> bool:
    """End the job as succeeded and publish its adapter in the same statement.

    Returns False if the lease is lost or the owner has cancelled the job; the same holds for the functions below.
    """
    columns = asdict(result)
    audit_results = columns.pop("audit_results")
    if not _end(session, claim, JobStatus.succeeded, error=None, **columns):
        return False
    _keep(session, claim, audit_results)
    events.append(session, claim.job_id, "info", "message", f"New fine-tuned model created: {result.fine_tuned_model}")
    events.append(session, claim.job_id, "info", "message", "The job has successfully completed")
    return True


def reject(session: Session, claim: Claim, result: Rejection) -> bool:
    """End the job as failed because its audit did not pass; keep its results.

    The adapter is kept too if `result.held` is set, because a waiver may release it later.
    """
    columns = asdict(result)
    audit_results, held = columns.pop("audit_results"), columns.pop("held")
    error = transitions.error_object("safety_gate_failed", columns.pop("message"))
    if not _end(session, claim, JobStatus.failed, error=error, **columns):
        return False
    _keep(session, claim, audit_results)
    if held is not None:
        session.add(HeldAdapter(job_id=claim.job_id, **held))
    events.append(session, claim.job_id, "error", "message", result.message, error)
    return True


def finish_audit(session: Session, claim: Claim) -> bool:
    """End a later audit's job as succeeded: the audit has decided, whatever its decision."""
    if not _end(session, claim, JobStatus.succeeded, error=None):
        return False
    events.append(session, claim.job_id, "info", "message", "The audit has decided; its job has trained nothing")
    return True


def fail(session: Session, claim: Claim, error: JobError) -> bool:
    """End the job as failed with OpenAI's error object: code, message, param."""
    if not _end(session, claim, JobStatus.failed, error=error):
        return False
    events.append(session, claim.job_id, "error", "message", error["message"], error)
    return True


def fail_overdue(session: Session, claim: Claim) -> bool:
    """End the job as failed because its deadline has passed."""
    return fail(session, claim, OVERDUE)


def confirm_cancel(session: Session, claim: Claim) -> bool:
    """End the job as cancelled after its worker has stopped; return False if the lease is lost."""
    job = _lock_held(session, claim)
    if job is not None:
        transitions.to_cancelled(session, job)
    return job is not None


def cancel_if_asked(session: Session, claim: Claim) -> bool:
    """End the job as cancelled if its owner has asked for that; return True if so.

    The result of the attempt does not matter: the API has already reported the job as cancelled.
    """
    job = _lock_held(session, claim)
    return bool(job and job.cancel_requested_at) and confirm_cancel(session, claim)


def requeue(
    session: Session,
    claim: Claim,
    delay_s: float,
    reason: str,
    error: JobError | None = None,
    *,
    blames_job: bool = False,
    avoid_s: float = 0.0,
) -> bool:
    """Give the job back after a failed attempt (see `transitions.hand_back`); return False if the lease is lost.

    `blames_job` says that nothing around the job explains the failure: if the same failure occurs at the same place
    twice in a row, no further attempt is made. For `avoid_s` seconds the job is left to other workers.
    """
    job = _lock_held(session, claim)
    if job is None:
        return False
    is_last = blames_job and transitions.is_repeated(job, reason)
    # A failure with another cause in between breaks the series: only two equal failures in a row count as the job's.
    job.last_failure = job.last_failure if blames_job else None
    transitions.hand_back(session, job, reason, delay_s, error, is_last=is_last, avoid_s=avoid_s)
    return True


def release(session: Session, claim: Claim, reason: str, *, waits: bool = False) -> bool:
    """Give the job back without counting the attempt; return False if the lease is lost.

    The reason is a worker that stops, or a failure of the surroundings; in the second case pass `waits`, and the job
    waits before its next attempt, longer each time.
    """
    job = _lock_held(session, claim)
    if job is None:
        return False
    transitions.refund_attempt(job)
    transitions.hand_back(session, job, reason, transitions.next_wait_s(job) if waits else 0.0, is_counted=False)
    return True


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """Return the condition that every write of a worker includes: its token is the newest and the job runs."""
    return (Job.id == claim.job_id) & (Job.lease_token == claim.token) & (Job.status == JobStatus.running)


def _end(session: Session, claim: Claim, status: JobStatus, **columns: Any) -> bool:
    """End the job; return False if the lease is lost or the owner has cancelled the job."""
    # The owner may have cancelled since the last heartbeat; then no result is published.
    is_ours = _is_held(claim) & Job.cancel_requested_at.is_(None)
    return transitions.change_status(session, is_ours, JobStatus.running, status, **columns) is not None


def _lock_held(session: Session, claim: Claim) -> Job | None:
    return transitions.lock_jobs(session, _is_held(claim)).one_or_none()


def _keep(session: Session, claim: Claim, audit_results: Iterable[AuditRow]) -> None:
    session.add_all(AuditResult(job_id=claim.job_id, **row) for row in audit_results)
    announce_audit(session, claim.job_id)


# Define what a worker submits at the end of a job.


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


# Hand back the jobs of lost workers, and fail overdue jobs.

_AT_ONCE_S = 1.0  # a transaction that takes longer to begin has waited for a lock


def run_reaper(engine: Engine, stop: Event, every_s: float) -> None:
    """Reap every `every_s` seconds until `stop` is set."""
    repeat(partial(reap_once, engine, ReaperRounds()), stop, every_s, "could not reap")


class ReaperRounds:
    """Skips reaping while another program keeps SQLite's write lock.

    Heartbeats wait for that lock as well, so leases expire although their workers are alive. After the lock is free,
    one more round is skipped to let workers extend their leases.
    """

    def __init__(self) -> None:
        self._was_locked = False

    def begin(self, session: Session) -> bool:
        """Begin the transaction; return True if this round may reap."""
        if session.get_bind().dialect.name != "sqlite":
            return True
        was_locked, self._was_locked = self._was_locked, True  # kept if the next line raises
        began = time.monotonic()
        session.connection()
        self._was_locked = time.monotonic() - began > _AT_ONCE_S
        return not (was_locked or self._was_locked)


def reap_once(engine: Engine, rounds: ReaperRounds | None = None) -> list[str]:
    """Reap once, for all workers; return the ids of the jobs that were handed back or failed."""
    with transaction(engine) as session:
        reaped = reap(session) if (rounds or ReaperRounds()).begin(session) else []
    if reaped:
        log.warning("reaped %s", ", ".join(reaped))
    return reaped


def reap(session: Session) -> list[str]:
    """Fail every overdue job, and hand back every job whose lease has expired; return their ids.

    An overdue job with a pending cancel is cancelled. Two reapers never take the same job.
    """
    is_lost = (Job.status == JobStatus.running) & (Job.lease_expires_at < now())
    # A paused job has no deadline: pausing clears it.
    is_overdue = Job.status.in_([JobStatus.queued, JobStatus.running]) & (Job.deadline_at < now())
    overdue = set()
    for job in transitions.lock_jobs(session, is_overdue, skip_locked=True).all():
        overdue.add(job.id)
        if job.cancel_requested_at:
            transitions.to_cancelled(session, job)
        else:
            transitions.to_failed(session, job, OVERDUE)
    # Overdue jobs are failed first, so this query no longer matches them.
    lost = transitions.lock_jobs(session, is_lost, skip_locked=True).all()
    for job in lost:
        transitions.hand_back(session, job, events.LEASE_EXPIRED)
    return sorted(overdue | {job.id for job in lost})
