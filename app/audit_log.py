"""Write, read and verify the audit log: an append-only table in which each row is chained to the previous one.

h_n = SHA-256(h_{n-1} || row_n), where row_n is the row's other columns as JSON with sorted keys and h_0 is 64 zeros. An
entry is written in the transaction of the action that it records, so that both are committed or neither is. Callers
never pass keys or texts of data sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC
from hashlib import sha256
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, JsonValue, computed_field
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from structlog.contextvars import get_contextvars

from app.db import Begin
from app.db.base import utc_now
from app.db.tables import AuditEntry
from app.http.schemas import UnixTime

CALLER = "caller"  # key in a session's info: the request's caller
_GENESIS = "0" * 64
_LOCK = 0x5BA2E  # an arbitrary number that only we use
_SYSTEM = "system"
_AT_ONCE = 1000
Result = Literal["ok", "denied"]


class EntryOut(BaseModel):
    """One action; `hash` chains it to the previous entry."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["audit_log.entry"] = "audit_log.entry"
    seq: int
    created_at: UnixTime
    actor: str
    tenant_id: str | None
    action: str
    target: str
    result: str
    request_id: str | None
    details: dict[str, JsonValue] | None
    hash: str

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own form
    @property
    def id(self) -> str:
        """The cursor of the next page."""
        return str(self.seq)


class EntryList(BaseModel):
    """One page of the audit log, newest first; for the next page set `after` to the last entry's `id`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[EntryOut]
    has_more: bool


class BrokenOut(BaseModel):
    """The first row that was changed or is missing."""

    model_config = ConfigDict(from_attributes=True)

    seq: int
    why: str


class VerificationOut(BaseModel):
    """The result of verifying the chain: the number of rows and the last hash, or the first broken row.

    Store `rows` and `head` elsewhere: a chain whose last rows were cut off is still intact.
    """

    object: Literal["audit_log.verification"] = "audit_log.verification"
    is_intact: bool
    rows: int | None = None
    head: str | None = None
    broken: BrokenOut | None = None


class _Principal(Protocol):
    @property
    def project_id(self) -> str: ...
    @property
    def key_id(self) -> str: ...


@dataclass(slots=True)
class Caller:
    """The sender of a request; `principal` is set once its key is recognized."""

    principal: _Principal | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """An intact chain: its number of rows and the last hash."""

    rows: int
    head: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The first row that was changed or is missing."""

    seq: int
    why: str


@dataclass(frozen=True, slots=True)
class Entries:
    """A page of the log."""

    data: list[AuditEntry]
    has_more: bool


def record(session: Session, action: str, target: str, result: Result = "ok", **details: Any) -> None:
    """Add an entry about the session's caller; other entries wait until the transaction ends, so call it last.

    `action` is a name such as `job.created`, `target` the id of the affected thing; `details` are stored as JSON.

        audit_log.record(session, "key.rotated", old.id, to=key.id)
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_LOCK)))  # SQLite allows one writer anyway
    caller: Caller = session.info.get(CALLER) or Caller()
    principal = caller.principal
    last = session.scalar(select(AuditEntry).order_by(AuditEntry.seq.desc()).limit(1))
    entry = AuditEntry(
        seq=last.seq + 1 if last else 1,
        created_at=utc_now(),
        actor=principal.key_id if principal else _SYSTEM,
        tenant_id=principal.project_id if principal else None,  # the hashed rows have this name
        action=action,
        target=target,
        result=result,
        request_id=get_contextvars().get("request_id"),
        details=details or None,
    )
    entry.hash = _hash(last.hash if last else _GENESIS, entry)
    session.add(entry)
    session.flush()


def entries(session: Session, action: str | None, after: int | None, limit: int) -> Entries:
    """Return a page of the log, newest first, of entries below `after`."""
    query = select(AuditEntry).order_by(AuditEntry.seq.desc()).limit(limit + 1)
    if action is not None:
        query = query.where(AuditEntry.action == action)
    if after is not None:
        query = query.where(AuditEntry.seq < after)
    rows = list(session.scalars(query))
    return Entries(rows[:limit], len(rows) > limit)


def verify(session: Session) -> Chain | Broken:
    """Recompute every hash; return the intact chain or the first row that does not match."""
    before, rows = _GENESIS, 0
    for entry in _in_order(session):
        rows += 1
        # Numbers have no gaps, because entries are written one at a time.
        if entry.seq != rows:
            return Broken(rows, "it is missing")
        if entry.hash != _hash(before, entry):
            return Broken(entry.seq, "it was changed: its hash does not match its content and the previous row")
        before = entry.hash
    return Chain(rows, before)


def verification(look: Begin) -> VerificationOut:
    """Return the result of `verify` as the API's object."""
    with look() as session:
        found = verify(session)
    if isinstance(found, Broken):
        return VerificationOut(is_intact=False, broken=BrokenOut.model_validate(found))
    return VerificationOut(is_intact=True, rows=found.rows, head=found.head)


def entry_hash(session: Session, seq: int) -> str | None:
    """Return the hash of an entry, to compare with a copy stored elsewhere."""
    return session.scalar(select(AuditEntry.hash).where(AuditEntry.seq == seq))


def _in_order(session: Session) -> Iterator[AuditEntry]:
    last = None
    while True:
        query = select(AuditEntry).order_by(AuditEntry.seq).limit(_AT_ONCE)
        rows = session.scalars(query if last is None else query.where(AuditEntry.seq > last)).all()
        yield from rows
        # The log may have millions of rows; without this the session keeps all of them in memory.
        session.expunge_all()
        if len(rows) < _AT_ONCE:
            return
        last = rows[-1].seq


def _hash(before: str, entry: AuditEntry) -> str:
    return sha256(before.encode() + _canonical(entry)).hexdigest()


def _canonical(entry: AuditEntry) -> bytes:
    """Return the bytes to hash, which are equal on every database."""
    row = {name: getattr(entry, name) for name in _COLUMNS}
    # A fixed form: databases return times with different zones and precision.
    row["created_at"] = entry.created_at.astimezone(UTC).isoformat(timespec="microseconds")
    return json.dumps(row, sort_keys=True, separators=(",", ":")).encode()


_COLUMNS = ("seq", "created_at", "actor", "tenant_id", "action", "target", "result", "request_id", "details")
