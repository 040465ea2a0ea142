"""What the owner of a job may ask for while it has not ended: cancel it, pause it, resume it."""

from __future__ import annotations

from sqlalchemy.orm import Session

from app.db.base import utc_now
from app.db.tables import TERMINAL, Job, JobStatus
from app.jobs import events, transitions


def request_cancel(session: Session, job_id: str, *, audits_last: bool = False) -> JobStatus | None:
    """Cancel a job that does not run at once, and ask the worker of a running one to stop.

    `audits_last`: that worker audits the job's last ends of epochs before. Whatever the worker still does, the job ends
    as cancelled. Returns the job's status, or None when it has ended, was cancelled before or is unknown.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        job.cancel_requested_at, job.audits_last = utc_now(), audits_last
        session.flush()
    else:
        transitions.to_cancelled(session, job)
    return job.status


def request_pause(session: Session, job_id: str) -> JobStatus | None:
    """Pause a queued job at once, and ask the worker of a running one to save a checkpoint and stop.

    Returns the job's status, or None when it has ended or is unknown.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        job.pause_requested_at = job.pause_requested_at or utc_now()
        session.flush()
    elif job.status == JobStatus.queued:
        transitions.to_paused(session, job)
    return job.status


def resume(session: Session, job_id: str) -> JobStatus | None:
    """Put a paused job back at its old place in the queue, and withdraw a pending pause of a running one.

    Returns the job's status, or None when it has ended or is unknown.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    job.pause_requested_at = None
    session.flush()
    if job.status == JobStatus.paused:
        transitions.change_status(session, Job.id == job.id, JobStatus.paused, JobStatus.queued, run_after=0.0)
        events.append(session, job.id, "info", "message", "Fine-tuning job resumed, moving job to queued state")
    return job.status


def _lock_unfinished(session: Session, job_id: str) -> Job | None:
    is_open = Job.status.not_in(TERMINAL) & Job.cancel_requested_at.is_(None)
    return transitions.lock_jobs(session, (Job.id == job_id) & is_open).one_or_none()
