"""Projects, their limits and usage; limits are enforced in the transaction that might exceed them.

That transaction holds a lock on the project's row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, bindparam, case, func, select, true
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db import now
from app.db.tables import (
    TERMINAL,
    File,
    InferenceCall,
    Job,
    JobCheckpoint,
    ObjectIntent,
    Project,
    Quota,
    Tombstone,
    Upload,
    UploadPart,
)
from app.db.tables.files import FINE_TUNE, WRITE
from app.db.tables.inference import IS_RUNNING
from app.errors import NotFound, QuotaExceeded
from app.http.schemas import Body, UnixTime

_MOST = 2**53
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Size = Annotated[int, Field(ge=0, le=_MOST)]


class QuotaSet(Body):
    """Limits of one project; null means unlimited (for requests: the deployment's limit).

    `weight` is its share of the GPUs relative to others, null for 1: twice the weight gets twice the time.
    """

    model_config = ConfigDict(extra="forbid", from_attributes=True)

    max_file_bytes: Size | None = None
    max_file_rows: Size | None = None
    max_jobs_per_day: Count | None = None
    max_unfinished_jobs: Count | None = None
    max_gpu_seconds: Annotated[float, Field(ge=0, le=_MOST)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens_per_day: Size | None = None
    weight: Annotated[float, Field(ge=0.01, le=1000)] | None = None


class ProjectCreate(Body):
    """A project to create. `name` is printable ASCII."""

    name: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,64}$")]


class ProjectOut(BaseModel):
    """A project: all holders of its keys share its files, jobs and limits."""

    id: str
    object: Literal["project"] = "project"
    name: str
    created_at: UnixTime
    quota: QuotaSet


class ProjectList(BaseModel):
    """All projects with their limits, oldest first."""

    object: Literal["list"] = "list"
    data: list[ProjectOut]
    has_more: Literal[False] = False


class Usage(BaseModel):
    """What the jobs of a project used in a period, and the bytes and rows of the files that it stores now.

    `calls` and both token counts are of inference requests in the period. `pending_bytes` are bytes of incomplete
    uploads, and of objects that are being written or wait for deletion.
    """

    object: Literal["usage"] = "usage"
    project_id: str
    jobs: int
    gpu_seconds: float
    trained_tokens: int
    calls: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    file_bytes: int = 0
    file_rows: int = 0
    pending_bytes: int = 0


class UsageList(BaseModel):
    """Usage by project id."""

    object: Literal["list"] = "list"
    data: list[Usage]
    has_more: Literal[False] = False


# Count tokens that running requests have reserved; a reservation ends with the lease of its process.


def reserved_tokens(session: Session, project_id: str) -> int:
    """Return the tokens that a project's running requests have reserved but not yet written."""
    call = InferenceCall
    left = case((call.reserved_tokens > call.reply_tokens, call.reserved_tokens - call.reply_tokens), else_=0)
    runs = (call.project_id == project_id) & (call.lease_expires_at > now())
    return int(session.scalar(select(func.sum(left)).where(IS_RUNNING, runs)) or 0)


_DAY, _MONTH = timedelta(days=1), timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that a write counts for while it runs, and the most it may write; None: unlimited."""

    bytes: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class TokenRoom:
    """The tokens left of a project's daily limit, and how many of them running replies have reserved."""

    left: int
    reserved: int


def check_job(session: Session, project_id: str) -> None:
    """Raise `QuotaExceeded` if the project may not create another job.

    The project's row stays locked until the transaction ends, so that concurrent requests are counted one by one.
    """
    check_job_without_lock(session, project_id)
    # First without the lock, so that a refusal does not wait for others; then again with it, for the exact count.
    if _lock_quota(session, project_id) is not None:
        check_job_without_lock(session, project_id)


def check_job_without_lock(reader: Session, project_id: str) -> None:
    """Raise `QuotaExceeded` if the project may not create another job now.

    Without a lock this is a quick check; a concurrent request may still use up the limit.
    """
    quota = reader.get(Quota, project_id)
    if quota is None:
        return
    if quota.max_unfinished_jobs is not None:
        # A cancelled job does not count, though its worker may still be stopping.
        is_open = Job.status.not_in(TERMINAL) & Job.cancel_requested_at.is_(None)
        open_jobs = select(func.count()).where(Job.project_id == project_id, is_open)
        _hold(reader.scalar(open_jobs) or 0, quota.max_unfinished_jobs, "jobs that have not ended")
    if quota.max_jobs_per_day is not None:
        _hold(_sum(reader, project_id, _DAY, "count"), quota.max_jobs_per_day, "jobs in 24 hours")
    if quota.max_gpu_seconds is not None:
        used = _sum(reader, project_id, _MONTH, "gpu_seconds")
        _hold(used, quota.max_gpu_seconds, "GPU seconds of jobs made in the last 30 days")


def check_file(session: Session, file: File) -> None:
    """Raise `QuotaExceeded` if a file exceeds its project's limits; call it before the file is added."""
    quota = _lock_quota(session, file.project_id)
    if quota is None:
        return
    size, rows = _stored_size(session, file.project_id)
    if quota.max_file_bytes is not None and size + file.bytes > quota.max_file_bytes:
        raise _refusal(f"{quota.max_file_bytes} bytes of files", f"it holds {size}, and this file has {file.bytes}")
    if quota.max_file_rows is not None and rows + (file.rows or 0) > quota.max_file_rows:
        raise _refusal(f"{quota.max_file_rows} rows of files", f"it holds {rows}, and this file has {file.rows or 0}")


def room_for_file(session: Session, project_id: str, expected: int) -> Room:
    """Return the room for a file of `expected` bytes; raise `QuotaExceeded` if there is none."""
    return _room(session, project_id, expected, counted=0)


def room_for_part(session: Session, upload: Upload, expected: int) -> Room:
    """Return the room for a part of an upload, whose announced bytes are counted already."""
    sent = sent_parts(session, Upload.id == upload.id)[upload.id]
    return _room(session, upload.project_id, expected, counted=max(upload.bytes - sent, 0))


def check_upload(session: Session, project_id: str, announced: int) -> None:
    """Raise `QuotaExceeded` if an upload of `announced` bytes exceeds its project's limit."""
    quota = _lock_quota(session, project_id)
    if quota is None or quota.max_file_bytes is None:
        return
    size, _ = _stored_size(session, project_id)
    if size + announced > quota.max_file_bytes:
        raise _refusal(f"{quota.max_file_bytes} bytes of files", f"it holds {size}, and this upload has {announced}")


def token_rate(session: Session, project_id: str) -> int | None:
    """Return how many tokens per minute a project's models may read and write; None means unlimited."""
    return session.scalar(select(Quota.tokens_per_minute).where(Quota.project_id == project_id))


def room_for_tokens(session: Session, project_id: str) -> TokenRoom | None:
    """Return how many tokens are left today; None means unlimited. Raises `QuotaExceeded` if none are left.

    The project's row is locked, so a reservation in this transaction counts for the next one. A reservation ends with
    its request, or with the lease of the process that answers it.
    """
    quota = _lock_quota(session, project_id)
    if quota is None or quota.max_tokens_per_day is None:
        return None
    of_late = (InferenceCall.project_id == project_id) & (InferenceCall.created_at > db.clock(session) - _DAY)
    used = session.scalar(select(func.sum(InferenceCall.prompt_tokens + InferenceCall.reply_tokens)).where(of_late))
    _hold(used or 0, quota.max_tokens_per_day, "tokens of prompts and replies in 24 hours")
    return TokenRoom(quota.max_tokens_per_day - int(used or 0), reserved_tokens(session, project_id))


def set_quota(session: Session, project_id: str, ask: QuotaSet) -> ProjectOut:
    """Set a project's limits; they replace all previous ones."""
    project = _project(session, project_id)
    session.merge(Quota(project_id=project.id, **ask.model_dump()))
    session.flush()
    audit_log.record(session, "quota.set", project.id, **ask.model_dump(mode="json"))
    return _project_with_quota(session, project)


def create_project(session: Session, name: str) -> ProjectOut:
    """Create a project without limits."""
    project = Project(name=name)
    session.add(project)
    session.flush()
    audit_log.record(session, "project.created", project.id, name=name)
    return _project_with_quota(session, project)


def projects(session: Session) -> list[ProjectOut]:
    """Return all projects, oldest first."""
    query = select(Project, Quota).outerjoin(Quota, Quota.project_id == Project.id)
    found = session.execute(query.order_by(Project.created_at, Project.id))
    return [_project_response(project, quota) for project, quota in found]


_NAMES = select(Project.id, Project.name).where(Project.id.in_(bindparam("ids", expanding=True)), Project.name != "")


def project_names(session: Session, project_ids: Collection[str]) -> dict[str, str]:
    """Return the names of these projects by their ids; a project without a name is left out."""
    if not project_ids:
        return {}
    return {each.id: each.name for each in db.rows(session, _NAMES, {"ids": list(set(project_ids))})}


def project(session: Session, project_id: str) -> ProjectOut:
    """Return a project with its limits; raise `NotFound` if there is none with this id."""
    return _project_with_quota(session, _project(session, project_id))


def usage(session: Session, since: datetime, until: datetime) -> list[Usage]:
    """Return what each project's jobs created in [since, until) used, and what the project stores now."""
    found: dict[str, Usage] = {}
    for table in (Job, Tombstone):
        query = (
            select(table.project_id, func.count(), func.sum(table.gpu_seconds), func.sum(table.trained_tokens))
            .where(table.created_at >= since, table.created_at < until)
            .group_by(table.project_id)
        )
        for project_id, jobs, seconds, tokens in session.execute(query):
            row = found.setdefault(project_id, _nothing(project_id))
            row.jobs += jobs
            row.gpu_seconds = round(row.gpu_seconds + (seconds or 0.0), 3)
            row.trained_tokens += int(tokens or 0)
    _add_calls(session, found, since, until)
    files = select(File.project_id, func.sum(File.bytes), func.sum(File.rows)).group_by(File.project_id)
    for project_id, size, rows in session.execute(files):
        row = found.setdefault(project_id, _nothing(project_id))
        row.file_bytes, row.file_rows = int(size), int(rows or 0)
    for project_id, size in pending_bytes(session).items():
        found.setdefault(project_id, _nothing(project_id)).pending_bytes = size
    kept = select(Job.project_id, func.sum(JobCheckpoint.bytes)).join(JobCheckpoint, JobCheckpoint.job_id == Job.id)
    for project_id, archives in session.execute(kept.group_by(Job.project_id)):
        found.setdefault(project_id, _nothing(project_id)).file_bytes += int(archives or 0)
    return [found[project_id] for project_id in sorted(found)]


def _add_calls(session: Session, found: dict[str, Usage], since: datetime, until: datetime) -> None:
    call = InferenceCall
    sums = func.count(), func.sum(call.prompt_tokens), func.sum(call.reply_tokens)
    in_time = (call.created_at >= since) & (call.created_at < until)
    for project_id, calls, read, written in session.execute(
        select(call.project_id, *sums).where(in_time).group_by(call.project_id)
    ):
        row = found.setdefault(project_id, _nothing(project_id))
        row.calls, row.prompt_tokens, row.reply_tokens = calls, int(read), int(written)


def _nothing(project_id: str) -> Usage:
    return Usage(project_id=project_id, jobs=0, gpu_seconds=0.0, trained_tokens=0)


def _lock_quota(session: Session, project_id: str) -> Quota | None:
    """Return the project's limits and lock its row, so that other checks wait until this transaction ends."""
    quota = session.get(Quota, project_id)
    if quota is not None:
        # FOR NO KEY UPDATE: rows that reference the project can still be inserted by others.
        session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
    return quota


def _stored_size(session: Session, project_id: str) -> tuple[int, int]:
    """Return the bytes and rows of a project's training files, including pending bytes."""
    of_project = (File.project_id == project_id) & (File.purpose == FINE_TUNE)
    held = select(func.sum(File.bytes), func.sum(File.rows)).where(of_project)
    size, rows = (int(each or 0) for each in session.execute(held).one())
    return size + pending_bytes(session, project_id)[project_id], rows


def _room(session: Session, project_id: str, expected: int, counted: int) -> Room:
    quota = session.get(Quota, project_id)
    if quota is None or quota.max_file_bytes is None:
        return Room(expected, None)
    _require_room(session, project_id, quota.max_file_bytes, counted)  # no lock yet: a refusal does not wait
    _lock_quota(session, project_id)
    left = _require_room(session, project_id, quota.max_file_bytes, counted)
    return Room(min(expected, left), left)


def _require_room(session: Session, project_id: str, limit: int, counted: int) -> int:
    """Return how many more bytes the project may store; raise `QuotaExceeded` if none."""
    size, _ = _stored_size(session, project_id)
    # What its upload has announced is in `size` already, so a part may fill that in any case.
    left = counted + max(limit - size, 0)
    if left == 0:
        raise _refusal(f"{limit} bytes of files", f"it holds {size}")
    return left


def _sum(session: Session, project_id: str, within: timedelta, what: str) -> float:
    """Sum over a project's recent jobs, including erased ones."""
    total = 0.0
    for table in (Job, Tombstone):
        column = func.count() if what == "count" else func.sum(table.gpu_seconds)
        of_late = (table.project_id == project_id) & (table.created_at > db.clock(session) - within)
        total += session.scalar(select(column).select_from(table).where(of_late)) or 0
    return total


def _hold(used: float, limit: float, what: str) -> None:
    if used >= limit:
        raise _refusal(f"{limit:g} {what}", f"it has {used:g}")


def _refusal(limit: str, state: str) -> QuotaExceeded:
    return QuotaExceeded(f"Your project may have {limit}: {state}. Ask the provider for more.")


def _project(session: Session, project_id: str) -> Project:
    project = session.get(Project, project_id)
    if project is None:
        raise NotFound(f"No such project: {project_id}", code="project_not_found", param="project_id")
    return project


def _project_with_quota(session: Session, project: Project) -> ProjectOut:
    return _project_response(project, session.get(Quota, project.id))


def _project_response(project: Project, quota: Quota | None) -> ProjectOut:
    limits = QuotaSet.model_validate(quota) if quota else QuotaSet()
    return ProjectOut(id=project.id, name=project.name, created_at=project.created_at, quota=limits)


# Count bytes that are being uploaded or wait for deletion; a quota counts them like the bytes of files.

_OPEN = Upload.status == "pending"


def pending_bytes(session: Session, project_id: str | None = None) -> Counter[str]:
    """Return the pending bytes by project, of one project or all.

    An upload in parts counts with its announced size, or with the size of its parts if that is larger.
    """
    found = Counter[str]()
    of_project = (Upload.project_id == project_id) if project_id else true()
    sent = sent_parts(session, of_project)
    query = select(Upload.id, Upload.project_id, Upload.bytes).where(_OPEN, of_project)
    for upload_id, owner, announced in session.execute(query):
        found[owner] += max(announced, sent[upload_id])
    # Parts that are being written are in `sent`, so their intents are not counted a second time.
    is_counted = (ObjectIntent.kind == WRITE) & ObjectIntent.subject.in_(select(Upload.id).where(_OPEN))
    is_owned = (ObjectIntent.project_id == project_id) if project_id else ObjectIntent.project_id.is_not(None)
    others = select(ObjectIntent.project_id, func.sum(ObjectIntent.bytes)).where(~is_counted, is_owned)
    for each, size in session.execute(others.group_by(ObjectIntent.project_id)):
        found[each or ""] += int(size)
    return found


def sent_parts(session: Session, which: ColumnElement[bool]) -> Counter[str]:
    """Return the bytes of each open upload's parts, including parts that are being written."""
    stored = select(UploadPart.upload_id, func.sum(UploadPart.bytes)).join(Upload, Upload.id == UploadPart.upload_id)
    coming = select(ObjectIntent.subject, func.sum(ObjectIntent.bytes)).join(Upload, Upload.id == ObjectIntent.subject)
    found = Counter[str]()
    for query in (
        stored.where(_OPEN, which).group_by(UploadPart.upload_id),
        coming.where(_OPEN, which, ObjectIntent.kind == WRITE).group_by(ObjectIntent.subject),
    ):
        for upload_id, size in session.execute(query):
            found[upload_id] += int(size)
    return found
