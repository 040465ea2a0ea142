"""Who works on a job, and the only ways in which its status changes.

A claim raises the job's `lease_token`; every write of a worker names its token and is refused when it is not the
newest. A worker that was thought dead and comes back can therefore do no harm: it is told False and stops.
Times are the database's. Nothing here commits; the caller's transaction holds the change and its event together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, ScalarResult, delete, func, insert, select
from sqlalchemy import update as sql_update
from sqlalchemy.orm import Session

from app.db import now, timestamp
from app.jobs import events
from app.jobs.results import Publication as Publication
from app.jobs.results import Rejection as Rejection
from app.models import TERMINAL, AuditResult, Job, JobMetric, JobStatus, utc_now

_CANCELLED = "Fine-tuning job cancelled"


@dataclass(frozen=True, slots=True)
class Claim:
    """One worker's right to one job, good while the token is the job's newest."""

    job_id: str
    token: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a heartbeat learns."""

    cancel_requested: bool


class Columns(TypedDict, total=False):
    """What a worker may write while it works."""

    phase: str
    progress: dict[str, Any]
    resolved: dict[str, Any]
    warnings: list[Any]
    checkpoint: dict[str, Any]
    trained_tokens: int


def claim(session: Session, owner: str, lease_s: float) -> Claim | None:
    """Take the oldest queued job that may start, won by exactly one worker; None when there is none."""
    is_ready = (Job.status == JobStatus.queued) & (Job.run_after <= now())
    oldest = select(Job.id).where(is_ready).order_by(Job.created_at, Job.id).limit(1)
    row = session.execute(
        sql_update(Job)
        .where(Job.id == oldest.with_for_update(skip_locked=True).scalar_subquery())
        .values(
            status=JobStatus.running,
            started_at=func.coalesce(Job.started_at, timestamp()),
            attempt=Job.attempt + 1,
            lease_token=Job.lease_token + 1,
            lease_owner=owner,
            lease_expires_at=now() + lease_s,
        )
        .returning(Job.id, Job.lease_token, Job.attempt, Job.max_attempts)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if row is None:
        return None
    again = f" again (attempt {row.attempt} of {row.max_attempts})" if row.attempt > 1 else ""
    events.append(session, row.id, "info", "message", f"Fine-tuning job started{again}")
    return Claim(row.id, row.lease_token, row.attempt)


def heartbeat(session: Session, claim: Claim, lease_s: float) -> Pulse | None:
    """Extend the lease; None when it is lost, and the work must stop at once."""
    row = session.execute(
        sql_update(Job)
        .where(_is_held(claim))
        .values(lease_expires_at=now() + lease_s)
        .returning(Job.cancel_requested_at)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    return None if row is None else Pulse(cancel_requested=row.cancel_requested_at is not None)


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
    if not _write(session, claim, error=None, **columns, **_ended(JobStatus.succeeded)):
        return False
    _keep(session, claim, audit_results)
    events.append(session, claim.job_id, "info", "message", f"New fine-tuned model created: {result.fine_tuned_model}")
    events.append(session, claim.job_id, "info", "message", "The job has successfully completed")
    return True


def reject(session: Session, claim: Claim, result: Rejection) -> bool:
    """running -> failed because the audit did not pass; what was measured is kept, the adapter is not."""
    columns = asdict(result)
    audit_results, error = columns.pop("audit_results"), _error("safety_gate_failed", columns.pop("message"))
    if not _write(session, claim, error=error, **columns, **_ended(JobStatus.failed)):
        return False
    _keep(session, claim, audit_results)
    events.append(session, claim.job_id, "error", "message", result.message, error)
    return True


def fail(session: Session, claim: Claim, error: dict[str, Any]) -> bool:
    """running -> failed, with OpenAI's error object: code, message, param."""
    if not _write(session, claim, error=error, **_ended(JobStatus.failed)):
        return False
    events.append(session, claim.job_id, "error", "message", error["message"], error)
    return True


def cancelled(session: Session, claim: Claim) -> bool:
    """running -> cancelled, once the work has stopped."""
    if not _write(session, claim, **_ended(JobStatus.cancelled)):
        return False
    events.append(session, claim.job_id, "info", "message", _CANCELLED)
    return True


def requeue(session: Session, claim: Claim, delay_s: float, reason: str, error: dict[str, Any] | None = None) -> bool:
    """running -> queued for another attempt, or failed with `error` (worker_lost) when this was the last one."""
    job = _held(session, claim)
    if job is None:
        return False
    _hand_back(session, job, reason, delay_s, error)
    return True


def release(session: Session, claim: Claim, reason: str) -> bool:
    """running -> queued because the worker is asked to stop; the attempt does not count."""
    job = _held(session, claim)
    if job is None:
        return False
    job.attempt -= 1
    _hand_back(session, job, reason)
    return True


def cancel(session: Session, job_id: str) -> JobStatus | None:
    """queued -> cancelled at once, running -> asked to stop; None when the job has ended or is unknown."""
    job = _locked(session, (Job.id == job_id) & Job.status.not_in(TERMINAL)).one_or_none()
    if job is None:
        return None
    if job.status == JobStatus.running:
        job.cancel_requested_at = job.cancel_requested_at or utc_now()
    else:
        _cancel(session, job)
    session.flush()
    return job.status


def reap(session: Session) -> list[str]:
    """Hand back every job whose worker let the lease run out; two reapers never take the same one."""
    is_lost = (Job.status == JobStatus.running) & (Job.lease_expires_at < now())
    jobs = _locked(session, is_lost, skip_locked=True).all()
    for job in jobs:
        _hand_back(session, job, "lease_expired")
    return [job.id for job in jobs]


def _is_held(claim: Claim) -> ColumnElement[bool]:
    """The guard of every write that a worker makes."""
    return (Job.id == claim.job_id) & (Job.lease_token == claim.token) & (Job.status == JobStatus.running)


def _write(session: Session, claim: Claim, **columns: Any) -> bool:
    written = sql_update(Job).where(_is_held(claim)).values(**columns).returning(Job.id)
    return session.scalar(written.execution_options(synchronize_session="fetch")) is not None


def _locked(session: Session, which: ColumnElement[bool], skip_locked: bool = False) -> ScalarResult[Job]:
    """Jobs as they are now, nobody else's to change until this transaction ends."""
    rows = select(Job).where(which).order_by(Job.id).with_for_update(skip_locked=skip_locked)
    return session.scalars(rows.execution_options(populate_existing=True))


def _held(session: Session, claim: Claim) -> Job | None:
    return _locked(session, _is_held(claim)).one_or_none()


def _ended(status: JobStatus) -> dict[str, Any]:
    return {"status": status, "finished_at": timestamp(), "lease_owner": None, "lease_expires_at": None}


def _hand_back(
    session: Session, job: Job, reason: str, delay_s: float = 0.0, error: dict[str, Any] | None = None
) -> None:
    if job.cancel_requested_at:
        _cancel(session, job)
    elif job.attempt < job.max_attempts:
        _set(job, status=JobStatus.queued, run_after=now() + delay_s, lease_owner=None, lease_expires_at=None)
        message = f"Fine-tuning job moved back to the queue: {reason}"
        events.append(session, job.id, "warn", "message", message, {"reason": reason, "attempt": job.attempt})
    else:
        error = error or _error("worker_lost", f"The job stopped {job.attempt} times without an end: {reason}.")
        _set(job, error=error, **_ended(JobStatus.failed))
        events.append(session, job.id, "error", "message", error["message"], error | {"reason": reason})
    session.flush()


def _cancel(session: Session, job: Job) -> None:
    _set(job, **_ended(JobStatus.cancelled))
    events.append(session, job.id, "info", "message", _CANCELLED)


def _set(job: Job, **columns: Any) -> None:
    for name, value in columns.items():
        setattr(job, name, value)


def _keep(session: Session, claim: Claim, audit_results: list[dict[str, Any]]) -> None:
    session.add_all(AuditResult(job_id=claim.job_id, **row) for row in audit_results)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None}
