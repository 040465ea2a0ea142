"""The moves of a job that workers, reapers and customers share. The caller holds the job's row."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, ScalarResult, case, select
from sqlalchemy.orm import Session

from app.db import now, timestamp
from app.jobs import events
from app.models import Job, JobStatus
from app.webhooks.outbox import announce

Error = dict[str, Any]

_CANCELLED = "Fine-tuning job cancelled"
_PAUSED = "Fine-tuning job paused"


def locked(session: Session, which: ColumnElement[bool], skip_locked: bool = False) -> ScalarResult[Job]:
    """Jobs as they are now, nobody else's to change until this transaction ends."""
    rows = select(Job).where(which).order_by(Job.id).with_for_update(skip_locked=skip_locked)
    return session.scalars(rows.execution_options(populate_existing=True))


def used() -> dict[str, Any]:
    """The columns that count the time with a worker up to now, or to the end of a lease that ran out."""
    until = case((Job.lease_expires_at < now(), Job.lease_expires_at), else_=now())
    is_counted = (Job.status == JobStatus.running) & Job.seen_at.is_not(None) & (until > Job.seen_at)
    return {"gpu_seconds": Job.gpu_seconds + case((is_counted, until - Job.seen_at), else_=0.0), "seen_at": now()}


def ended(status: JobStatus) -> dict[str, Any]:
    """The columns of a job that is over."""
    return used() | {"status": status, "finished_at": timestamp(), "lease_owner": None, "lease_expires_at": None}


def error(code: str, message: str) -> Error:
    """OpenAI's error object."""
    return {"code": code, "message": message, "param": None}


def cancel(session: Session, job: Job) -> None:
    _set(job, **ended(JobStatus.cancelled))
    announce(session, job.id, JobStatus.cancelled)
    events.append(session, job.id, "info", "message", _CANCELLED)


def pause(session: Session, job: Job) -> None:
    """It waits for its customer; the clock of its deadline starts anew when it goes on."""
    _rest(job, JobStatus.paused)
    _set(job, pause_requested_at=None, deadline_at=None)
    events.append(session, job.id, "info", "message", _PAUSED)


def fail(session: Session, job: Job, error: Error, **data: Any) -> None:
    _set(job, error=error, **ended(JobStatus.failed))
    announce(session, job.id, JobStatus.failed)
    events.append(session, job.id, "error", "message", error["message"], error | data)


def hand_back(session: Session, job: Job, reason: str, delay_s: float = 0.0, cause: Error | None = None) -> None:
    """To where the customer wants it, else to the queue, or to its end when this was the last attempt."""
    if job.cancel_requested_at:
        cancel(session, job)
    elif job.pause_requested_at:
        pause(session, job)
    elif job.attempt < job.max_attempts:
        _rest(job, JobStatus.queued)
        job.run_after = now() + delay_s
        message = f"Fine-tuning job moved back to the queue: {reason}"
        events.append(session, job.id, "warn", "message", message, {"reason": reason, "attempt": job.attempt})
    else:
        lost = error("worker_lost", f"The job stopped {job.attempt} times without an end: {reason}.")
        fail(session, job, cause or lost, reason=reason)
    session.flush()


def _rest(job: Job, status: JobStatus) -> None:
    _set(job, **used(), status=status, lease_owner=None, lease_expires_at=None)


def _set(job: Job, **columns: Any) -> None:
    for name, value in columns.items():
        setattr(job, name, value)
