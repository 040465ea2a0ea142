"""Find the project of a job for the provider, and report a job of another project as unknown."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.tables import Job
from app.errors import NotFound


def job_project(session: Session, job_id: str) -> str:
    """Return the project of a job, for keys with the scope `admin`; raise `NotFound` if there is no such job."""
    project_id = session.scalar(select(Job.project_id).where(Job.id == job_id))
    if project_id is None:
        raise unknown(job_id)
    return project_id


def unknown(job_id: str) -> NotFound:
    """Return the error for a job that does not exist or belongs to another project."""
    return NotFound(f"Could not find fine tune: {job_id}", code="fine_tune_not_found", param="fine_tuning_job_id")
