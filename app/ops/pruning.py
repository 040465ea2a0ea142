"""Delete expired rows: sent wake-ups, idempotency keys, browser sessions, workers, stored replies, old positions."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, select, tuple_
from sqlalchemy.sql.dml import ReturningDelete

from app.db import Begin, now, timestamp
from app.db.base import utc_now
from app.db.tables import BrowserSession, DeletedPlace, IdempotencyKey, Outbox, StoredReply, WorkerRow

_SENT_STAY = timedelta(hours=1)
KEYS_STAY = timedelta(days=30)  # a client that sends a request again does so within minutes
_GONE_S = 86_400.0  # since a worker was last seen
_PLACES_STAY = timedelta(days=30)
_AT_ONCE = 1000


def prune(begin: Begin) -> None:
    """Delete all expired rows, a thousand in a transaction, so that no transaction is long."""
    for removal in (_delete_sent(), _keys(), _sign_ins(), _workers(), _replies(), _places()):
        removed = _AT_ONCE
        while removed == _AT_ONCE:
            with begin() as session:
                removed = len(session.execute(removal).all())


def _delete_sent() -> ReturningDelete[tuple[int]]:
    due = select(Outbox.id).where(Outbox.sent_at < utc_now() - _SENT_STAY).limit(_AT_ONCE)
    return delete(Outbox).where(Outbox.id.in_(due)).returning(Outbox.id)


def _keys() -> ReturningDelete[tuple[str]]:
    key = (IdempotencyKey.project_id, IdempotencyKey.key)
    due = select(*key).where(IdempotencyKey.created_at < utc_now() - KEYS_STAY).limit(_AT_ONCE)
    return delete(IdempotencyKey).where(tuple_(*key).in_(due)).returning(IdempotencyKey.key)


def _sign_ins() -> ReturningDelete[tuple[str]]:
    due = select(BrowserSession.digest).where(BrowserSession.expires_at < timestamp()).limit(_AT_ONCE)
    return delete(BrowserSession).where(BrowserSession.digest.in_(due)).returning(BrowserSession.digest)


def _workers() -> ReturningDelete[tuple[str]]:
    due = select(WorkerRow.name).where(WorkerRow.seen_at < now() - _GONE_S).limit(_AT_ONCE)
    return delete(WorkerRow).where(WorkerRow.name.in_(due)).returning(WorkerRow.name)


def _replies() -> ReturningDelete[tuple[str]]:
    due = select(StoredReply.id).where(StoredReply.expires_at < timestamp()).limit(_AT_ONCE)
    return delete(StoredReply).where(StoredReply.id.in_(due)).returning(StoredReply.id)


def _places() -> ReturningDelete[tuple[str]]:
    due = select(DeletedPlace.id).where(DeletedPlace.deleted_at < utc_now() - _PLACES_STAY).limit(_AT_ONCE)
    return delete(DeletedPlace).where(DeletedPlace.id.in_(due)).returning(DeletedPlace.id)
