"""Guard result files that contain an adapter: they follow the same release rules as the job's adapter route."""

from __future__ import annotations

import re

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db import Begin
from app.db.tables import File, Job
from app.db.tables.files import RESULTS
from app.files import service as files
from app.jobs import service as jobs
from app.keys.service import Principal

_ATTEMPT = re.compile(r"tenants/[^/]+/jobs/(?P<job>ftjob-[^/]+)/.+")
_ARCHIVE = ".tar.gz"


def require_released(look: Begin, begin: Begin, caller: Principal, file_id: str) -> File:
    """Return the project's file; if it contains an adapter, check the release and log the download.

    Raises the errors of the job's adapter route if the adapter is not released to the caller, and `NotFound` for an
    archive that belongs to no job's adapter.
    """
    with look() as session:
        file = files.get(session, caller.project_id, file_id)
        job_id = adapter_job(session, file)
    if job_id is not None:
        with begin() as session:
            jobs.adapter(session, caller, job_id)
    elif file.purpose == RESULTS and file.filename.endswith(_ARCHIVE):
        raise files.unknown(file_id)  # no job's adapter: no rule releases it
    return file


def adapter_job(session: Session, file: File) -> str | None:
    """Return the id of the job whose adapter a file contains; None for any other file."""
    if file.purpose != RESULTS:
        return None
    made = _ATTEMPT.fullmatch(file.storage_key)
    # A key of an attempt names its job; only other keys need a search through the project's adapters.
    of_job = Job.id == made["job"] if made else Job.adapter["storage_key"].as_string() == file.storage_key
    query = select(Job.id, Job.adapter).where(Job.project_id == file.project_id, of_job)
    found = ((job_id, adapter) for job_id, adapter in session.execute(query) if adapter)
    return next((job_id for job_id, adapter in found if adapter["storage_key"] == file.storage_key), None)
