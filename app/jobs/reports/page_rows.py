"""Read the rows for job pages, one statement per kind: jobs, their files, and their undefended twins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, literal, select, union_all
from typing_extensions import TypedDict

from app import db
from app.db.tables import DeletedModel, File, Job, LaterAudit
from app.db.tables.job_records import Adapter
from app.files import service as files
from app.jobs import owners
from app.jobs.rows import ALL, JobRow

_LOOKED_AT = 50  # newest jobs on the same model that are searched for a twin


class Later(NamedTuple):
    """A later audit as a page shows it; the fields are columns of the table `later_audits`."""

    step: int
    created_at: datetime
    audit_version: int
    decision: str | None
    reasons: list[str] | None


class PageJob(NamedTuple):
    """A job with its report's storage key, its adapter if it still exists, and its later audits."""

    row: JobRow
    report_key: str | None
    adapter: Adapter | None = None
    later: Sequence[Later] = ()  # the newest first
    filename: str | None = None  # of the training file; None: it was deleted


class Problem(TypedDict):
    """The part of a file's problem that a job page counts."""

    code: str


class JobFile(NamedTuple):
    """A file as a page shows it; the fields are columns of the table `files`."""

    id: str
    filename: str
    bytes: int
    sha256: str
    storage_key: str
    problems: list[Problem] | None


_WIDTH = len(JobRow._fields)


def _split(columns: Iterable[Any]) -> tuple[PageJob, Later | None]:
    """Split a row into the job, without later audits, and the row's later audit or None."""
    values = list(columns)
    row, (report_key, adapter, deleted, filename) = values[:_WIDTH], values[_WIDTH : _WIDTH + 4]
    audit = values[_WIDTH + 4 :]
    job = PageJob(JobRow._make(row), report_key, adapter if deleted is None else None, filename=filename)
    return job, None if audit[0] is None else Later._make(audit)


_IS_TRAINING_FILE = (File.id == Job.training_file) & files.LIVES
_WITH_LATER = (
    ALL.add_columns(
        *(Job.report_key, Job.adapter, DeletedModel.job_id, File.filename),
        *(getattr(LaterAudit, name) for name in Later._fields),
    )
    .outerjoin(File, _IS_TRAINING_FILE)
    .outerjoin(DeletedModel, DeletedModel.job_id == Job.id)
    .outerjoin(LaterAudit, LaterAudit.job_id == Job.id)
    .where(Job.id == bindparam("job_id"))
    .order_by(LaterAudit.created_at.desc(), LaterAudit.round.desc(), LaterAudit.id)
)
_OF_ANY = db.Prepared(_WITH_LATER, _split)
_OF_PROJECT = db.Prepared(_WITH_LATER.where(Job.project_id == bindparam("project_id")), _split)


def one(reader: db.Reader, project_id: str | None, job_id: str) -> PageJob:
    """Return a job of the project, or of any project if None; raise `NotFound` if there is none."""
    if project_id is None:
        found = _OF_ANY.all(reader, job_id=job_id)
    else:
        found = _OF_PROJECT.all(reader, job_id=job_id, project_id=project_id)
    if not found:
        raise owners.unknown(job_id)
    return found[0][0]._replace(later=[later for _, later in found if later])


def several(reader: db.Reader, project_id: str, job_ids: Collection[str]) -> list[PageJob]:
    """Return jobs of the project in the order of `job_ids`, without adapters and later audits.

    Raises `NotFound` if one of them is missing.
    """
    query = ALL.add_columns(Job.report_key, File.filename).outerjoin(File, _IS_TRAINING_FILE)
    query = query.where(Job.project_id == project_id, Job.id.in_(job_ids))
    found = {
        row.id: PageJob(JobRow._make(row[:_WIDTH]), row.report_key, filename=row.filename)
        for row in db.rows(reader, query)
    }
    for job_id in job_ids:
        if job_id not in found:
            raise owners.unknown(job_id)
    return [found[job_id] for job_id in job_ids]


def job_files(reader: db.Reader, job: PageJob) -> Mapping[str, JobFile]:
    """Return a job's result files and, once it was audited, its training file, by id."""
    row = job.row
    is_wanted: ColumnElement[bool] = File.id.in_(row.result_files or [])
    if job.report_key:
        is_wanted |= (File.id == row.training_file) & files.LIVES
    elif not row.result_files:
        return {}
    query = select(*(getattr(File, name) for name in JobFile._fields)).where(File.project_id == row.project_id)
    return {found.id: JobFile._make(found) for found in db.rows(reader, query.where(is_wanted))}


def undefended_reports(reader: db.Reader, jobs: Collection[PageJob]) -> dict[str, str]:
    """Return, by job id, the storage key of the report of each defended job's newest undefended twin.

    A twin is a job of the same project without a defense that trained the same model on the same bytes. Only jobs with
    a report are considered.
    """
    defended = [job.row for job in jobs if job.report_key and job.row.recipe["defense"]["type"] != "none"]
    if not defended:
        return {}
    alike = union_all(*map(_without_defense, defended)).order_by("created_at")
    # Oldest first: of several twins of a job, the newest overwrites the others.
    return {job_id: report_key for job_id, report_key, _ in db.rows(reader, alike)}


def _without_defense(job: JobRow) -> Select[tuple[str, str, datetime]]:
    is_alike = (Job.project_id == job.project_id) & (Job.model == job.model) & (Job.id != job.id)
    defense, file = Job.recipe[("defense", "type")].as_string(), Job.spec[("training_file", "sha256")].as_string()
    newest = (
        select(Job.created_at, Job.report_key, defense.label("defense"), file.label("file"))
        .where(is_alike, Job.report_key.is_not(None))
        .order_by(Job.created_at.desc())
        .limit(_LOOKED_AT)
        .subquery()
    )
    return select(literal(job.id).label("job_id"), newest.c.report_key, newest.c.created_at).where(
        newest.c.defense == "none", newest.c.file == job.spec.training_file.sha256
    )
