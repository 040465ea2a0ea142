"""Append and read a job's events: numbered messages in OpenAI's wording."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db.tables import Job, JobEvent

RESUMED = "resumed_after_step"  # key of an event's data: the last step before an attempt that resumes training
LEASE_EXPIRED = "lease_expired"  # the `reason` of a requeue: the worker sent no heartbeat in time


def append(
    session: Session,
    job_id: str,
    level: str,
    type: str,
    message: str,
    data: Mapping[str, object] | None = None,
    event_id: str | None = None,
) -> JobEvent:
    """Append an event to a job, with the next number; the job's row is locked so that no number is used twice.

    Pass `event_id` if the write may be repeated because the writer does not know that its transaction was committed;
    see `stored_ids`.
    """
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())
    following = select(func.coalesce(func.max(JobEvent.seq), 0) + 1).where(JobEvent.job_id == job_id)
    event = JobEvent(
        job_id=job_id,
        seq=following.scalar_subquery(),
        level=level,
        type=type,
        message=message,
        data=None if data is None else dict(data),
    )
    if event_id is not None:
        event.id = event_id
    session.add(event)
    session.flush()
    return event


def stored_ids(session: Session, job_id: str, event_ids: Collection[str]) -> set[str]:
    """Return the subset of `event_ids` that the job's events already have."""
    if not event_ids:
        return set()
    return set(session.scalars(select(JobEvent.id).where(JobEvent.job_id == job_id, JobEvent.id.in_(event_ids))))


def was_abandoned(session: Session, job_id: str) -> bool:
    """Return True if a queued job is in the queue because its last worker's lease expired."""
    warnings = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.level == "warn")
    last = session.scalars(warnings.order_by(JobEvent.seq.desc()).limit(1)).first()
    return last is not None and last.get("reason") == LEASE_EXPIRED
