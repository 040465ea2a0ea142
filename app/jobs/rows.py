"""Find a job, and read the columns of its API object without the ORM: this is the most frequent query by far."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from app import db
from app.db.tables import Job, JobStatus, Tombstone
from app.db.tables.job_records import JobError, Progress, RecipeJson, ResolvedJson, SafetySummary
from app.db.tables.job_spec import JobSpec
from app.db.tables.jobs import public_status
from app.errors import NotFound
from app.http.pagination import Places


class JobRow(NamedTuple):
    """The columns of a job that its API object shows; each field is the column of the same name."""

    id: str
    project_id: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    model: str
    training_file: str
    validation_file: str | None
    job_metadata: dict[str, str] | None
    recipe: RecipeJson
    spec: JobSpec
    priority: int
    memory_bytes: int | None
    shared_bytes: int
    status: JobStatus
    phase: str
    progress: Progress | None
    resolved: ResolvedJson | None
    warnings: list[str] | None
    error: JobError | None
    cancel_requested_at: datetime | None
    launch_reason: str | None
    suffix: str | None
    fine_tuned_model: str | None
    trained_tokens: int | None
    result_files: list[str] | None
    safety: SafetySummary | None

    @property
    def public_status(self) -> JobStatus:
        """The status on the wire, like `Job.public_status`."""
        return public_status(self.status, self.cancel_requested_at)


AnyJob = Job | JobRow  # `job_response` accepts either

ALL = select(*(getattr(Job, name) for name in JobRow._fields))
_ONE = db.PreparedStatement(
    ALL.where(Job.project_id == bindparam("project_id"), Job.id == bindparam("job_id")), JobRow._make
)


def find(reader: db.Reader, project_id: str, job_id: str) -> JobRow | None:
    """Return the project's job; None if it does not exist or belongs to another project."""
    return _ONE.one(reader, project_id=project_id, job_id=job_id)


def position(project_id: str | None, after: str | None) -> Places:
    """Return queries for the list position of a job that a list no longer contains; none without a job `after`.

    Its status may have changed, so that a filter excludes it, or it was erased.
    """
    if after is None:
        return ()
    job = select(Job.created_at).where(Job.id == after)
    erased = select(Tombstone.created_at).where(Tombstone.job_id == after)
    if project_id is None:
        return job, erased
    return job.where(Job.project_id == project_id), erased.where(Tombstone.project_id == project_id)


# Find the project of a job for the provider, and report a job of another project as unknown.


def job_project(session: Session, job_id: str) -> str:
    """Return the project of a job, for keys with the scope `admin`; raise `NotFound` if there is no such job."""
    project_id = session.scalar(select(Job.project_id).where(Job.id == job_id))
    if project_id is None:
        raise unknown(job_id)
    return project_id


def unknown(job_id: str) -> NotFound:
    """Return the error for a job that does not exist or belongs to another project."""
    return NotFound(f"Could not find fine tune: {job_id}", code="fine_tune_not_found", param="fine_tuning_job_id")
