"""Add the names of training files to jobs for display."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from app import db
from app.db.tables import File
from app.files import service as files
from app.jobs.schemas import JobOut


def add_file_names(reader: db.Reader, jobs: Sequence[JobOut]) -> None:
    """Set each job's `filename` to the name of its training file, if that file still exists."""
    ids = {job.training_file for job in jobs}
    if not ids:
        return
    found = db.rows(reader, select(File.id, File.filename).where(File.id.in_(ids), files.LIVES))
    names = {row.id: row.filename for row in found}
    for job in jobs:
        job.filename = names.get(job.training_file)
