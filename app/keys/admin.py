"""Manage keys for the provider; a key's secret is shown only once.

A key without an owner, like the first one, may create any key. A key with an owner creates admin keys only for that
owner: nobody can pose as a second person.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import ApiKey, Project
from app.errors import Forbidden, InvalidState, NotFound
from app.http.schemas import Body, UnixTime
from app.keys import service
from app.keys.service import Principal

Scope = Literal["customer", "read", "admin"]
_YEARS_S = 10 * 366 * 86_400


def _customer() -> list[Scope]:
    return ["customer"]


class KeyCreate(Body):
    """A key of a project; without `expires_in_s` it is valid until it is revoked.

    The scope `read` allows a customer's GET requests only. `owner` is the person who will hold the key: a name or a
    mail address.
    """

    project_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,64}$")]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=3)] = Field(default_factory=_customer)
    owner: Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,126}[!-~])?$")] | None = None
    expires_in_s: Annotated[int, Field(ge=60, le=_YEARS_S)] | None = None


class KeyOut(BaseModel):
    """A key; `last_used_at` is accurate to five minutes."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["api_key"] = "api_key"
    project_id: str
    name: str
    owner: str | None
    prefix: str
    scopes: list[Scope]
    created_at: UnixTime
    expires_at: UnixTime | None
    last_used_at: UnixTime | None
    revoked_at: UnixTime | None


class KeySecret(BaseModel):
    """A key with its secret, which is shown only once."""

    object: Literal["api_key.secret"] = "api_key.secret"
    key: KeyOut
    secret: str


class KeyList(BaseModel):
    """All keys, oldest first, without their secrets; including revoked and expired ones."""

    object: Literal["list"] = "list"
    data: list[KeyOut]
    has_more: Literal[False] = False


def list_keys(session: Session, project_id: str | None) -> Sequence[ApiKey]:
    """Return keys, oldest first and including revoked ones; of all projects if `project_id` is None."""
    query = select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)
    return session.scalars(query if project_id is None else query.where(ApiKey.project_id == project_id)).all()


def create(session: Session, caller: Principal, ask: KeyCreate) -> tuple[ApiKey, str]:
    """Create a key for an existing project; return it with its secret, which is not stored.

    Raises `NotFound` for an unknown project, and `Forbidden` if the caller may not create admin keys for another owner.
    """
    if session.get(Project, ask.project_id) is None:
        raise NotFound(f"No such project: {ask.project_id}", code="project_not_found", param="project_id")
    _check_owner(session, caller, ask.scopes, ask.owner)
    key, secret = service.create(session, ask.project_id, ask.name, sorted(set(ask.scopes)), ask.owner)
    key.expires_at = db.clock(session) + timedelta(seconds=ask.expires_in_s) if ask.expires_in_s else None
    session.flush()
    return key, secret


def rotate(session: Session, caller: Principal, key_id: str, overlap: timedelta) -> tuple[ApiKey, str]:
    """Replace a key by a new one with the same scopes and lifetime; the old one expires after `overlap`.

    Returns the new key with its secret. Raises `InvalidState` if the old key is revoked or expired.
    """
    old, now = _get(session, key_id), db.clock(session)
    if not service.is_good(old, now):
        raise InvalidState(f"{old.id} is revoked or has expired; make a new key.")
    _check_owner(session, caller, old.scopes, old.owner)
    key, secret = service.create(session, old.project_id, old.name, old.scopes, old.owner)
    # The new key gets the old one's whole lifetime, not the rest of it.
    key.expires_at = now + (old.expires_at - old.created_at) if old.expires_at else None
    end = now + overlap
    # A rotation never extends the old key.
    old.expires_at = min(end, old.expires_at) if old.expires_at else end
    session.flush()
    audit_log.record(session, "key.rotated", old.id, to=key.id)
    return key, secret


def revoke(session: Session, key_id: str) -> ApiKey:
    """Revoke a key; revoking it again has no effect."""
    key = _get(session, key_id)
    if key.revoked_at is None:
        key.revoked_at = db.clock(session)
        session.flush()
        audit_log.record(session, "key.revoked", key.id)
    return key


def _check_owner(session: Session, caller: Principal, scopes: Sequence[str], owner: str | None) -> None:
    own = session.get_one(ApiKey, caller.key_id).owner
    if "admin" in scopes and own is not None and (owner is None or owner.casefold() != own.casefold()):
        message = f"Your key belongs to {own} and creates admin keys for {own} only; ask the holder of the first key."
        raise Forbidden(message, code="another_owner")


def _get(session: Session, key_id: str) -> ApiKey:
    key = session.get(ApiKey, key_id, with_for_update=True)
    if key is None:
        raise NotFound(f"No such key: {key_id}", code="key_not_found", param="key_id")
    return key
