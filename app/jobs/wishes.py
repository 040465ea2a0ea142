"""What a job's customer may want of it while it has not ended: to cancel it, to pause it, to let it go on."""

from __future__ import annotations

from sqlalchemy.orm import Session

from app.jobs import events, moves
from app.models import TERMINAL, Job, JobStatus, utc_now


def cancel(session: Session, job_id: str) -> JobStatus | None:
    """At once, or as soon as its worker has stopped; None when the job has ended or is unknown."""
    job = _open(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        job.cancel_requested_at = job.cancel_requested_at or utc_now()
    else:
        moves.cancel(session, job)
    session.flush()
    return job.status


def pause(session: Session, job_id: str) -> JobStatus | None:
    """queued -> paused at once, running -> asked to checkpoint and stop; None when the job has ended or is unknown."""
    job = _open(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        job.pause_requested_at = job.pause_requested_at or utc_now()
    elif job.status == JobStatus.queued:
        moves.pause(session, job)
    session.flush()
    return job.status


def resume(session: Session, job_id: str) -> JobStatus | None:
    """paused -> queued, at its old place; a wish to pause is taken back. None when it has ended or is unknown."""
    job = _open(session, job_id)
    if job is None:
        return None
    job.pause_requested_at = None
    if job.status == JobStatus.paused:
        job.status, job.run_after = JobStatus.queued, 0.0
        events.append(session, job.id, "info", "message", "Fine-tuning job resumed, moving job to queued state")
    session.flush()
    return job.status


def _open(session: Session, job_id: str) -> Job | None:
    return moves.locked(session, (Job.id == job_id) & Job.status.not_in(TERMINAL)).one_or_none()
