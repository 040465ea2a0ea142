"""The row of each inference request: inserted before anything is generated, completed when the request ends.

The texts of requests are stored, listed and erased for providers whose policy keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from app import audit_log, db, quotas
from app.catalog.model_files import read_positions
from app.db import now
from app.db.base import new_id
from app.db.tables import InferenceCall, Project, StoredReply
from app.db.tables.inference import RUNNING
from app.errors import NotFound, Reserved
from app.http.pagination import Page, page
from app.http.rate_limit import RateLimits
from app.http.schemas import UnixTime
from app.inference.protocol import Ask, Proof
from app.inference.released import ReleasedModel, find_released
from app.keys import Principal
from app.policies import service as policies
from app.policies.schemas import GuardRule
from app.settings import Settings

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class AdmittedCall:
    """A request that may be answered; `max_tokens` is the limit of each of its replies."""

    id: str
    model: ReleasedModel
    max_tokens: int
    guard: GuardRule | None
    reserved: int = 0  # tokens reserved of its project's quota; 0 if the project has none
    store_days: int | None = None  # how many days its texts are stored; None: not at all


@dataclass(frozen=True, slots=True)
class Owner:
    """The API process that answers a request, and how many seconds its lease lasts without a heartbeat."""

    name: str
    lease_s: float


@dataclass(slots=True)
class Outcome:
    """How a request ended: `status` is `done` or an error code; tokens are counted over all replies."""

    status: str
    prompt_tokens: int = 0
    reply_tokens: int = 0
    first_token_s: float | None = None
    seconds: float | None = None
    texts: list[str] = field(default_factory=list)  # the replies as shown, if the policy stores them


def admit(
    session: Session,
    caller: Principal,
    name: str,
    ask: Ask,
    endpoint: str,
    settings: Settings,
    limits: RateLimits,
    owner: Owner,
) -> AdmittedCall:
    """Check that a request may be answered, insert its row, and reserve its tokens of the project's quota.

    Raises `NotFound` if the model is not released to the caller, and `TooManyRequests`, `QuotaExceeded` or `Reserved`
    if the project's rate or quota is used up. A key's first call to a model within a day goes into the audit log.
    """
    model = find_released(session, caller, name, settings)
    _check_rate(session, caller, limits)
    most = min(ask["max_tokens"] or settings.max_reply_tokens, settings.max_reply_tokens)
    most, reserved = _reserve(session, caller, model, most, ask["n"])
    call = InferenceCall(
        id=new_id("call_"),
        created_at=db.clock(session),
        project_id=caller.project_id,
        key_id=caller.key_id,
        endpoint=endpoint,
        model=name,
        archive_sha256=model.archive.sha256 if model.archive else None,
        is_attested=model.server is None,
        status=RUNNING,
        reserved_tokens=reserved,
        owner=owner.name,
        lease_expires_at=now() + owner.lease_s,
    )
    is_first = not _was_called(session, call)
    session.add(call)
    session.flush()
    if is_first:
        note = partial(audit_log.record, session, "model.called", name, sha256=call.archive_sha256, endpoint=endpoint)
        note() if call.is_attested else note(is_attested=False)
    serving = policies.serving(session)
    return AdmittedCall(call.id, model, most, serving.guard, reserved, serving.store.days if serving.store else None)


def shrink_reservation(session: Session, admitted: AdmittedCall, prompt_tokens: int, n: int) -> None:
    """Lower a request's reservation to the tokens that fit after the prompt, once the prompt's length is known."""
    model = admitted.model
    positions = read_positions(model.source, model.revision) if admitted.reserved else None
    if positions is not None and (left := max(0, positions - prompt_tokens) * n) < admitted.reserved:
        session.get_one(InferenceCall, admitted.id).reserved_tokens = left


def note_load(session: Session, model: ReleasedModel, proof: Proof) -> None:
    """Record in the audit log that an engine has loaded an adapter, with the result of its probe."""
    audit_log.record(session, "model.loaded", model.name, sha256=model.adapter, **proof)


def finish(session: Session, admitted: AdmittedCall, ask: Ask | None, outcome: Outcome) -> None:
    """Store how a request ended, end its reservation, and store its texts if the policy says so."""
    call = session.get_one(InferenceCall, admitted.id)
    if admitted.store_days is not None and ask is not None:
        keep_texts(session, call, admitted.model, ask, outcome.texts, admitted.store_days)
    call.status, call.prompt_tokens, call.reply_tokens = outcome.status, outcome.prompt_tokens, outcome.reply_tokens
    call.reserved_tokens, call.lease_expires_at = 0, None
    call.first_token_s, call.seconds = outcome.first_token_s, outcome.seconds


def spend(session: Session, project_id: str, limits: RateLimits, tokens: int) -> None:
    """Count tokens against the project's tokens per minute, if it has such a limit."""
    per_minute = quotas.token_rate(session, project_id)
    if per_minute is not None and tokens:
        limits.spend("tokens", project_id, per_minute, tokens)


def _reserve(session: Session, caller: Principal, model: ReleasedModel, most: int, n: int) -> tuple[int, int]:
    """Return the limit of tokens of each reply, and the tokens to reserve for all `n` of them.

    Raises `Reserved` if running requests have reserved the quota's remaining tokens.
    """
    room = quotas.room_for_tokens(session, caller.project_id)
    if room is None:
        return most, 0
    positions = read_positions(model.source, model.revision)
    most = max(1, min(most, room.left // n, positions or most))
    if room.reserved and most * n > room.left - room.reserved:
        raise Reserved(
            f"This request may take {most * n} tokens, and of the {room.left} that your project has left in 24 hours "
            f"{room.reserved} are reserved by replies that are being written. Wait for these, or ask for fewer tokens "
            "with max_tokens."
        )
    return most, most * n


def _check_rate(session: Session, caller: Principal, limits: RateLimits) -> None:
    per_minute = quotas.token_rate(session, caller.project_id)
    if per_minute is not None:
        limits.look("tokens", caller.project_id, per_minute).require("tokens")


def _was_called(session: Session, call: InferenceCall) -> bool:
    """Return True if this key has called the same model bytes within the last day, and the audit log has an entry."""
    same = (InferenceCall.key_id == call.key_id) & (InferenceCall.model == call.model)
    bytes_of = (
        InferenceCall.archive_sha256.is_(None)
        if call.archive_sha256 is None
        else InferenceCall.archive_sha256 == call.archive_sha256
    )
    of_project = (InferenceCall.project_id == call.project_id) & (InferenceCall.created_at > db.clock(session) - _DAY)
    return session.scalar(select(InferenceCall.id).where(of_project, same, bytes_of).limit(1)) is not None


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


def keep_texts(
    session: Session, call: InferenceCall, model: ReleasedModel, ask: Ask, replies: list[str], days: int
) -> None:
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
    _require_project(session, project_id)
    own = (StoredReply.project_id == project_id) & (StoredReply.expires_at > db.timestamp())
    # `after` may name a text that has expired or was erased since: take its position from either row.
    expired = select(StoredReply.created_at).where(StoredReply.project_id == project_id, StoredReply.id == after)
    erased = select(InferenceCall.created_at).where(InferenceCall.project_id == project_id, InferenceCall.id == after)
    left = (expired, erased)
    found = page(session, select(StoredReply).where(own), StoredReply, after, limit, ascending=False, left=left)
    audit_log.record(session, "stored_replies.read", project_id, count=len(found.data))
    return found


def erase_replies(session: Session, project_id: str) -> int:
    """Erase all stored texts of a project and return how many requests they belonged to; record it in the audit log."""
    _require_project(session, project_id)
    own = StoredReply.project_id == project_id
    count = session.scalar(select(func.count()).select_from(StoredReply).where(own)) or 0
    session.execute(delete(StoredReply).where(own))
    audit_log.record(session, "stored_replies.erased", project_id, count=count)
    return count


def _require_project(session: Session, project_id: str) -> None:
    if session.get(Project, project_id) is None:
        raise NotFound(f"No such project: {project_id[:64]}", code="project_not_found", param="project_id")
