"""What a person follows on a job: events in order, worded as OpenAI words them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.models import Job, JobEvent


def append(
    session: Session, job_id: str, level: str, type: str, message: str, data: dict[str, Any] | None = None
) -> JobEvent:
    """Add an event after those that the job has; the job's row is locked, so that no two take the same number."""
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())
    following = select(func.coalesce(func.max(JobEvent.seq), 0) + 1).where(JobEvent.job_id == job_id)
    event = JobEvent(job_id=job_id, seq=following.scalar_subquery(), level=level, type=type, message=message, data=data)
    session.add(event)
    session.flush()
    return event
