"""Store, list and erase the texts of requests, for providers whose policy keeps them."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import InferenceCall, Project, StoredReply
from app.errors import NotFound
from app.http.pagination import Page, page
from app.http.schemas import UnixTime
from app.inference.protocol import Ask
from app.inference.released import Released


class StoredTurn(BaseModel):
    """A turn as the model read it, shown unchanged even if today's request rules differ."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None


class StoredReplyOut(BaseModel):
    """A stored request with its replies; `prompt` is a list of messages, or the text that was continued."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["stored_reply"] = "stored_reply"
    created_at: UnixTime
    expires_at: UnixTime
    model: str
    prompt: str | list[StoredTurn]
    replies: list[str]


class StoredReplyList(BaseModel):
    """A page of a project's stored requests, newest first."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[StoredReplyOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredRepliesDeleted(BaseModel):
    """How many stored requests of a project were erased."""

    object: Literal["stored_replies.deleted"] = "stored_replies.deleted"
    project_id: str
    deleted: int


def keep(session: Session, call: InferenceCall, model: Released, ask: Ask, replies: list[str], days: int) -> None:
    """Store the texts of a request for `days` days."""
    stored = StoredReply(id=call.id, project_id=call.project_id, model=call.model, replies=replies)
    stored.prompt = ask["prompt"] if ask["messages"] is None else ask["messages"]
    stored.job_id = model.archive.job_id if model.archive else None
    stored.created_at = call.created_at  # the call's row outlives the texts, so pagination works after an erasure
    stored.expires_at = db.clock(session) + timedelta(days=days)
    session.add(stored)


def list_replies(session: Session, project_id: str, after: str | None, limit: int) -> Page[StoredReply]:
    """Return a page of a project's stored requests that have not expired, newest first.

    The read is recorded in the audit log. Raises `NotFound` for an unknown project.
    """
    _check(session, project_id)
    own = (StoredReply.project_id == project_id) & (StoredReply.expires_at > db.timestamp())
    # `after` may name a text that has expired or was erased since: take its position from either row.
    expired = select(StoredReply.created_at).where(StoredReply.project_id == project_id, StoredReply.id == after)
    erased = select(InferenceCall.created_at).where(InferenceCall.project_id == project_id, InferenceCall.id == after)
    left = (expired, erased)
    found = page(session, select(StoredReply).where(own), StoredReply, after, limit, ascending=False, left=left)
    audit_log.record(session, "stored_replies.read", project_id, count=len(found.data))
    return found


def erase(session: Session, project_id: str) -> int:
    """Erase all stored texts of a project and return how many requests they belonged to; record it in the audit log."""
    _check(session, project_id)
    own = StoredReply.project_id == project_id
    count = session.scalar(select(func.count()).select_from(StoredReply).where(own)) or 0
    session.execute(delete(StoredReply).where(own))
    audit_log.record(session, "stored_replies.erased", project_id, count=count)
    return count


def _check(session: Session, project_id: str) -> None:
    if session.get(Project, project_id) is None:
        raise NotFound(f"No such project: {project_id[:64]}", code="project_not_found", param="project_id")
