"""Files as rows: listed, read, deleted; every query is within one tenant."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import Select, or_, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.db import timestamp
from app.errors import InvalidState, NotFound
from app.files.models import CondemnedObject
from app.files.schemas import Validation
from app.models import TERMINAL, File, Job
from app.pages import Page, page

FINE_TUNE = "fine-tune"
RESULTS = "fine-tune-results"


def list_files(
    session: Session, tenant_id: str, purpose: str | None, after: str | None, limit: int, *, ascending: bool
) -> Page[File]:
    query = _of(tenant_id)
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    return page(session, query, File, after, limit, ascending=ascending)


def add(session: Session, file: File) -> None:
    """A file that has come in, in one piece or in parts."""
    session.add(file)
    audit_log.record(session, "file.uploaded", file.id, sha256=file.sha256, bytes=file.bytes)


def get(session: Session, tenant_id: str, file_id: str, param: str | None = None) -> File:
    """The tenant's file; somebody else's reads as unknown."""
    file = session.scalar(_of(tenant_id).where(File.id == file_id))
    if file is None:
        raise NotFound(f"No such File object: {file_id}", code="file_not_found", param=param)
    return file


def get_for_job(session: Session, tenant_id: str, file_id: str, param: str) -> File:
    """The same, and no deletion can overtake the job that is about to name it."""
    session.execute(_of(tenant_id).where(File.id == file_id).with_for_update())
    return get(session, tenant_id, file_id, param)


def delete(session: Session, tenant_id: str, file_id: str) -> File:
    """Forget a file that no unfinished job needs; the caller removes its bytes after the commit."""
    session.execute(_of(tenant_id).where(File.id == file_id).with_for_update())
    file = get(session, tenant_id, file_id)
    if job_id := user_of(session, tenant_id, file_id):
        raise InvalidState(f"{file_id} is used by {job_id}, which has not ended; cancel it first.")
    condemn(session, file)
    audit_log.record(session, "file.deleted", file.id, sha256=file.sha256)
    return file


def condemn(session: Session, file: File) -> None:
    """Forget a file; its bytes are removed after the commit, by the caller at once or by the next sweep."""
    session.merge(CondemnedObject(storage_key=file.storage_key))
    session.delete(file)


def user_of(session: Session, tenant_id: str, file_id: str) -> str | None:
    """An unfinished job that needs the file."""
    uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
    unfinished = Job.status.not_in(TERMINAL)
    return session.scalar(select(Job.id).where(Job.tenant_id == tenant_id, uses, unfinished).limit(1))


def validation(session: Session, tenant_id: str, file_id: str) -> Validation:
    """Every problem that was found, and how many of each kind."""
    file = get(session, tenant_id, file_id)
    return listed(file, file.problems or [])


def listed(file: File, problems: list[dict[str, Any]]) -> Validation:
    """Problems as they are shown."""
    return Validation(
        file_id=file.id,
        status=file.status,
        rows=file.rows,
        counts=dict(Counter(problem["code"] for problem in problems)),
        problems=problems,
        next_after_line=problems[-1].get("after_line") if problems else None,
    )


def is_metrics(file: File) -> bool:
    """Whether it is the table of a job's steps."""
    return file.purpose == RESULTS and file.filename.endswith(".csv")


def errors_of(file: File) -> list[dict[str, Any]]:
    return [problem for problem in file.problems or [] if problem["severity"] == "error"]


def _of(tenant_id: str) -> Select[File]:
    """The tenant's files that have not expired."""
    lives = or_(File.expires_at.is_(None), File.expires_at > timestamp())
    return select(File).where(File.tenant_id == tenant_id, lives)
