"""Who works on a job, and the only ways in which its status changes.

A claim raises the job's `lease_token`; every write of a worker names its token and is refused when it is not the
newest. A worker that was thought dead and comes back can therefore do no harm: it is told False and stops.
Times are the database's. Nothing here commits; the caller's transaction holds the change and its event together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, and_, delete, func, insert
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from app.db import now, timestamp
from app.jobs import events, moves, turns
from app.jobs.results import Publication as Publication
from app.jobs.results import Rejection as Rejection
from app.jobs.wishes import cancel as cancel
from app.jobs.wishes import pause as pause
from app.jobs.wishes import resume as resume
from app.models import AuditResult, Job, JobMetric, JobStatus
from app.waivers.models import HeldAdapter
from app.webhooks.outbox import announce, announce_audit

_OVERDUE = moves.error("deadline_exceeded", "The job took longer than the provider allows.")


@dataclass(frozen=True, slots=True)
class Claim:
    """One worker's right to one job, good while the token is the job's newest."""

    job_id: str
    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a heartbeat learns."""

    cancel_requested: bool = False
    pause_requested: bool = False
    is_overdue: bool = False


class Columns(TypedDict, total=False):
    """What a worker may write while it works."""

    phase: str
    progress: dict[str, Any]
    resolved: dict[str, Any]
    warnings: list[Any]
    checkpoint: dict[str, Any]
    trained_tokens: int


def claim(session: Session, owner: str, lease_s: float, max_run_s: float | None = None) -> Claim | None:
    """Take the job whose turn it is, won by exactly one worker; None when there is none that may start.

    A job that has no deadline yet gets one, `max_run_s` from now.
    """
    for tenant_id in turns.tenants(session):
        row = session.execute(
            sql_update(Job)
            .where(Job.id == turns.first_of(tenant_id).scalar_subquery())
            .values(
                status=JobStatus.running,
                started_at=func.coalesce(Job.started_at, timestamp()),
                attempt=Job.attempt + 1,
                lease_token=Job.lease_token + 1,
                lease_owner=owner,
                lease_expires_at=now() + lease_s,
                seen_at=now(),
                deadline_at=func.coalesce(Job.deadline_at, now() + max_run_s if max_run_s else None),
            )
            .returning(Job.id, Job.lease_token, Job.attempt, Job.max_attempts)
            .execution_options(synchronize_session=False)
        ).one_or_none()
        if row:
            again = f" again (attempt {row.attempt} of {row.max_attempts})" if row.attempt > 1 else ""
            events.append(session, row.id, "info", "message", f"Fine-tuning job started{again}")
            return Claim(row.id, row.lease_token, row.attempt)
    return None


def heartbeat(session: Session, claim: Claim, lease_s: float) -> Pulse | None:
    """Extend the lease; None when it is lost, and the work must stop at once."""
    is_overdue = and_(Job.deadline_at.is_not(None), Job.deadline_at < now())
    row = session.execute(
        sql_update(Job)
        .where(_is_held(claim))
        .values(lease_expires_at=now() + lease_s, **moves.used())
        .returning(Job.cancel_requested_at, Job.pause_requested_at, is_overdue)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    return None if row is None else Pulse(row[0] is not None, row[1] is not None, bool(row[2]))


def update(session: Session, claim: Claim, **columns: Unpack[Columns]) -> bool:
    """Write how the work stands; False when the lease is lost."""
    return _write(session, claim, **columns)


def holds(session: Session, claim: Claim) -> bool:
    """Whether the lease is ours until this transaction ends: what else it writes for the job is then guarded too."""
    return _held(session, claim) is not None


def record_metrics(session: Session, claim: Claim, rows: Mapping[int, dict[str, Any]]) -> bool:
    """Keep each step's numbers; a step that is trained again after a restart replaces its row."""
    if not holds(session, claim):
        return False
    of_job = JobMetric.job_id == claim.job_id
    session.execute(delete(JobMetric).where(of_job, JobMetric.step.in_(rows)))
    if rows:
        session.execute(
            insert(JobMetric), [{"job_id": claim.job_id, "step": step, "data": data} for step, data in rows.items()]
        )
    return True


def publish(session: Session, claim: Claim, result: Publication) -> bool:
    """running -> succeeded: the one statement that makes an adapter exist for its customer."""
    columns = asdict(result)
    audit_results = columns.pop("audit_results")
    if not _end(session, claim, JobStatus.succeeded, error=None, **columns):
        return False
    _keep(session, claim, audit_results)
    events.append(session, claim.job_id, "info", "message", f"New fine-tuned model created: {result.fine_tuned_model}")
    events.append(session, claim.job_id, "info", "message", "The job has successfully completed")
    return True


def reject(session: Session, claim: Claim, result: Rejection) -> bool:
    """running -> failed because the audit did not pass; what was measured is kept, the adapter at most for a waiver."""
    columns = asdict(result)
    audit_results, error = columns.pop("audit_results"), moves.error("safety_gate_failed", columns.pop("message"))
    held = columns.pop("held")
    if not _end(session, claim, JobStatus.failed, error=error, **columns):
        return False
    _keep(session, claim, audit_results)
    if held is not None:
        session.add(HeldAdapter(job_id=claim.job_id, **held))
    events.append(session, claim.job_id, "error", "message", result.message, error)
    return True


def fail(session: Session, claim: Claim, error: dict[str, Any]) -> bool:
    """running -> failed, with OpenAI's error object: code, message, param."""
    if not _end(session, claim, JobStatus.failed, error=error):
        return False
    events.append(session, claim.job_id, "error", "message", error["message"], error)
    return True


def fail_overdue(session: Session, claim: Claim) -> bool:
    """running -> failed because its time is over."""
    return fail(session, claim, _OVERDUE)


def cancelled(session: Session, claim: Claim) -> bool:
    """running -> cancelled, once the work has stopped."""
    job = _held(session, claim)
    if job is not None:
        moves.cancel(session, job)
        session.flush()
    return job is not None


def requeue(
    session: Session,
    claim: Claim,
    delay_s: float,
    reason: str,
    error: dict[str, Any] | None = None,
    *,
    blames_job: bool = False,
) -> bool:
    """running -> queued for another attempt, or failed with `error` (worker_lost) when this was the last one.

    `blames_job`: nothing around the job explains the failure. The same one at the same place again is the last one.
    """
    job = _held(session, claim)
    if job is None:
        return False
    failure = {"reason": reason, "phase": job.phase, "step": (job.progress or {}).get("step")}
    if blames_job and failure == job.last_failure:
        job.max_attempts = job.attempt
    job.last_failure = failure if blames_job else None
    moves.hand_back(session, job, reason, delay_s, error)
    return True


def release(session: Session, claim: Claim, reason: str) -> bool:
    """running -> queued, or paused if the customer asked for it, because work was to stop; no attempt is counted."""
    job = _held(session, claim)
    if job is None:
        return False
    job.attempt -= 1
    moves.hand_back(session, job, reason)
    return True


def reap(session: Session) -> list[str]:
    """Hand back every job whose worker let the lease run out, and end those that are overdue.

    Two reapers never take the same job.
    """
    is_lost = (Job.status == JobStatus.running) & (Job.lease_expires_at < now())
    is_overdue = Job.status.in_([JobStatus.queued, JobStatus.running]) & (Job.deadline_at < now())
    overdue = set()
    for job in moves.locked(session, is_overdue, skip_locked=True).all():
        overdue.add(job.id)
        moves.fail(session, job, _OVERDUE)
    session.flush()
    lost = moves.locked(session, is_lost, skip_locked=True).all()
    for job in lost:
        moves.hand_back(session, job, "lease_expired")
    return sorted(overdue | {job.id for job in lost})


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """The guard of every write that a worker makes."""
    return (Job.id == claim.job_id) & (Job.lease_token == claim.token) & (Job.status == JobStatus.running)


def _write(session: Session, claim: Claim, **columns: Any) -> bool:
    written = sql_update(Job).where(_is_held(claim)).values(**columns).returning(Job.id)
    return session.scalar(written.execution_options(synchronize_session="fetch")) is not None


def _end(session: Session, claim: Claim, status: JobStatus, **columns: Any) -> bool:
    """running -> over, and the customer is told of it."""
    if not _write(session, claim, **columns, **moves.ended(status)):
        return False
    announce(session, claim.job_id, status)
    return True


def _held(session: Session, claim: Claim) -> Job | None:
    return moves.locked(session, _is_held(claim)).one_or_none()


def _keep(session: Session, claim: Claim, audit_results: list[dict[str, Any]]) -> None:
    session.add_all(AuditResult(job_id=claim.job_id, **row) for row in audit_results)
    announce_audit(session, claim.job_id)
