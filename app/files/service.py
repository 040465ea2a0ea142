"""List, read and delete files; every query is limited to one project."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, bindparam, or_, select
from sqlalchemy.orm import Session

from app import audit_log, db, objects
from app.db import timestamp
from app.db.tables import TERMINAL, File, Job
from app.db.tables.files import FINE_TUNE, RESULTS
from app.errors import InvalidState, NotFound
from app.files import findings
from app.files.schemas import FileOut, FindingOut, Validation
from app.http.pagination import Page, note_deleted, page, select_deleted_position
from spard.data import jsonl

LIVES = or_(File.expires_at.is_(None), File.expires_at > timestamp())  # matches files that have not expired
_UNREADABLE = frozenset(jsonl.JSON_CODES)  # codes of lines that are not rows
_NAMES = [name for name in FileOut.model_fields if name != "object"]
_SHOWN = db.PreparedStatement(
    select(*(getattr(File, name) for name in _NAMES)).where(
        File.project_id == bindparam("project_id"), File.id == bindparam("file_id"), LIVES
    ),
    lambda row: FileOut.model_validate(dict(zip(_NAMES, row, strict=True))),
)


def list_files(
    session: Session, project_id: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
) -> Page[File]:
    """Return one page of the project's files; `purpose` None means any purpose."""
    query = _select_files(project_id)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    # The cursor may have expired since the last page: its row is still there, though no list shows it.
    expired = select(File.created_at).where(File.project_id == project_id, File.id == after)
    left = (expired, select_deleted_position(project_id, after))
    return page(session, query, File, after, limit, ascending=ascending, left=left)


def trainable_files(session: Session, project_id: str, min_rows: int, limit: int) -> list[File]:
    """Return the project's newest files that a job of at least `min_rows` rows can train on, at most `limit`."""
    fits = (File.purpose == FINE_TUNE) & (File.status == "processed") & (File.rows >= min_rows)
    newest = _select_files(project_id).where(fits).order_by(File.created_at.desc(), File.id.desc())
    # A processed file may still be unfit, which only its findings tell; a few more are read to make up for those.
    found = session.scalars(newest.limit(2 * limit)).all()
    return [file for file in found if not is_unfit(file)][:limit]


def add(session: Session, file: File) -> None:
    """Add an uploaded file and record it in the audit log."""
    session.add(file)
    audit_log.record(session, "file.uploaded", file.id, sha256=file.sha256, bytes=file.bytes)


def get(session: Session, project_id: str, file_id: str, param: str | None = None) -> File:
    """Return the project's file; raise `NotFound` for an unknown file or one of another project."""
    file = session.scalar(_select_files(project_id).where(File.id == file_id))
    if file is None:
        raise unknown(file_id, param)
    return file


def retrieve(reader: db.Reader, project_id: str, file_id: str) -> FileOut:
    """Return the API's object for the project's file; raise `NotFound` if the project has no such file."""
    found = _SHOWN.one(reader, project_id=project_id, file_id=file_id)
    if found is None:
        raise unknown(file_id)
    return found


def get_for_job(session: Session, project_id: str, file_id: str, param: str) -> File:
    """Return the project's file with its row locked, so that it cannot be deleted before the job is stored."""
    session.execute(_select_files(project_id).where(File.id == file_id).with_for_update())
    return get(session, project_id, file_id, param)


def forget(session: Session, project_id: str, file_id: str) -> None:
    """Delete a file's row; its bytes are deleted after the commit.

    Raises `InvalidState` if an unfinished job needs the file.
    """
    session.execute(_select_files(project_id).where(File.id == file_id).with_for_update())
    file = get(session, project_id, file_id)
    if job_id := unfinished_job(session, project_id, file_id):
        raise InvalidState(f"{file_id} is used by {job_id}, which has not ended; cancel it first.")
    condemn(session, file)
    audit_log.record(session, "file.deleted", file.id, sha256=file.sha256)


def condemn(session: Session, file: File, subject: str | None = None) -> None:
    """Delete a file's row and schedule its bytes for deletion after the commit.

    They are deleted together with the other objects of `subject`, by default the file's own id.
    """
    subject = subject or file.id
    objects.condemn(session, file.storage_key, project_id=file.project_id, subject=subject, bytes=file.bytes)
    note_deleted(session, file.project_id, file.id, file.created_at)
    session.delete(file)


def unfinished_job(session: Session, project_id: str, file_id: str) -> str | None:
    """Return the id of an unfinished job that needs the file, or None."""
    uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
    unfinished = Job.status.not_in(TERMINAL) & Job.cancel_requested_at.is_(None)  # a cancelled job needs no file
    return session.scalar(select(Job.id).where(Job.project_id == project_id, uses, unfinished).limit(1))


def validation(session: Session, project_id: str, file_id: str) -> Validation:
    """Return every stored problem of a file, and the count of each kind."""
    file = get(session, project_id, file_id)
    return validation_response(file, file.problems or [], file_findings(file))


def file_findings(file: File) -> list[FindingOut]:
    """Return each fault of a file once; computed from the listed problems if findings were not stored."""
    problems = file.problems or []
    unreadable = len({problem["line"] for problem in problems if problem["code"] in _UNREADABLE})
    stored = findings.of_problems(problems, (file.rows or 0) + unreadable) if file.findings is None else file.findings
    return [FindingOut.model_validate(each) for each in stored]


def validation_response(file: File, problems: list[dict[str, Any]], found: Sequence[FindingOut]) -> Validation:
    """Return the API's object for a file's problems and findings."""
    return Validation(
        findings=list(found),
        file_id=file.id,
        status=file.status,
        rows=file.rows,
        counts=dict(Counter(problem["code"] for problem in problems)),
        problems=problems,
        next_after_line=problems[-1].get("after_line") if problems else None,
    )


def with_problems(found: Validation, problems: list[dict[str, Any]], after: int) -> Validation:
    """Return the validation with the problems after line `after` added; the count of unlisted problems stays last."""
    more = [problem for problem in problems if problem["line"] > after]
    rows = sorted(found.problems + more, key=lambda problem: (problem["line"] is None, problem["line"] or 0))
    known = {each.code for each in found.findings}
    added = [each for each in findings.of_problems(more, found.rows or 0) if each["code"] not in known]
    update = {
        "problems": rows,
        "counts": dict(Counter(problem["code"] for problem in rows)),
        "findings": [*found.findings, *map(FindingOut.model_validate, added)],
    }
    return found.model_copy(update=update)


def is_metrics(file: File) -> bool:
    """Return True if the file is the table of a job's step metrics."""
    return file.purpose == RESULTS and file.filename.endswith(".csv")


def file_errors(file: File) -> list[dict[str, Any]]:
    """Return the errors that make a file unfit for training, without warnings."""
    return [problem for problem in file.problems or [] if problem["severity"] == "error"]


def is_unfit(file: File) -> bool:
    """Return True if a file cannot be trained on.

    Its `status` does not tell: with `bad_files` set to OpenAI's behavior, such a file is `processed` and its jobs fail.
    """
    return file.status != "processed" or bool(file_errors(file))


def _select_files(project_id: str) -> Select[File]:
    """Select the project's files that have not expired."""
    return select(File).where(File.project_id == project_id, LIVES)


def unknown(file_id: str, param: str | None = None) -> NotFound:
    """Return the error for a file that does not exist or belongs to another project."""
    return NotFound(f"No such File object: {file_id}", code="file_not_found", param=param)
