"""Requests of a job's owner while the job is unfinished: cancel, pause, resume."""

from __future__ import annotations

from sqlalchemy.orm import Session

from app.db.base import utc_now
from app.db.tables import TERMINAL, Job, JobStatus
from app.jobs import events, transitions


def request_cancel(session: Session, job_id: str, *, audits_last: bool = False) -> JobStatus | None:
    """Cancel a queued or paused job at once, or ask the worker of a running job to stop.

    With `audits_last`, the worker first audits the checkpoints of the job's last epochs. The job ends as cancelled
    whatever its worker still does. Returns the job's status, or None if the job has ended, was cancelled before or does
    not exist.
    """
    job = _lock_unfinished(session, job_id)
    if job is None:
        return None
    if job.status == JobStatus.running:
        # The status changes when the worker has stopped; until then the API shows `cancelled` (`Job.public_status`).
        job.cancel_requested_at, job.audits_last = utc_now(), audits_last
        session.flush()
    else:
        transitions.to_cancelled(session, job)
    return job.status


def request_pause(session: Session, job_id: str) -> JobStatus | None:
    """Pause a queued job at once, or ask the worker of a running job to save a resume state and stop.

    Returns the job's status, or None if the job has ended or does not exist.
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
    """Return a paused job to its old place in the queue, or withdraw the pending pause of a running job.

    Returns the job's status, or None if the job has ended or does not exist.
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
    # A job whose cancel is pending counts as ended: to its owner it already is.
    is_open = Job.status.not_in(TERMINAL) & Job.cancel_requested_at.is_(None)
    return transitions.lock_jobs(session, (Job.id == job_id) & is_open).one_or_none()
