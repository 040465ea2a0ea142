"""Store intents. Each change is one conditional statement, so of two processes at one key only one succeeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import CursorResult, Select, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app.db import timestamp
from app.db.base import Base
from app.db.tables import CondemnedObject, ObjectIntent
from app.db.tables.objects import DELETE, DELETE_PREFIX, WRITE
from app.errors import Unavailable

_TABLE = Base.metadata.tables[ObjectIntent.__tablename__]


class GivenUp(Unavailable):
    """A write took so long that its bytes were given up; the client may send the request again."""


@dataclass(frozen=True, slots=True)
class Planned:
    """An object about to be written: its key, project, and the file, upload or corpus it belongs to.

    `bytes` count against the project's quota until the write ends; at most `limit` bytes are written.
    """

    key: str
    project_id: str | None
    subject: str
    bytes: int = 0
    limit: int | None = None


def plan(session: Session, planned: Iterable[Planned]) -> None:
    """Record planned writes; commit this before the first byte is written."""
    rows = [
        {"storage_key": each.key, "kind": WRITE, "project_id": each.project_id, "subject": each.subject}
        | {"bytes": each.bytes}
        for each in planned
    ]
    session.execute(insert(ObjectIntent), rows)


def resolve_named(session: Session, keys: Iterable[str]) -> None:
    """Remove the intents of written objects, in the transaction whose rows reference them.

    Raises `GivenUp` if a sweep has turned one into a deletion.
    """
    for key in keys:
        ours = (ObjectIntent.storage_key == key) & (ObjectIntent.kind == WRITE)
        # The sweep may have turned the write into a deletion; then the bytes may be gone already.
        if _count(session.execute(delete(ObjectIntent).where(ours))) != 1:
            raise GivenUp("The request took too long, and what it stored was given up; send it again.")


def abandon_writes(session: Session, keys: Iterable[str]) -> Sequence[ObjectIntent]:
    """Turn writes that no transaction has referenced into deletions, and return these.

    A referencing transaction in flight holds the row: this waits for it, and then finds nothing to turn.
    """
    return _turn(session, keys)


def give_up_old(session: Session, age: timedelta, most: int) -> Sequence[ObjectIntent]:
    """Turn writes older than `age`, whose process must be dead, into deletions; at most `most`."""
    # By the database's clock, like `created_at`.
    began_before = session.scalars(select(timestamp())).one() - age
    old = select(ObjectIntent.storage_key).where(ObjectIntent.kind == WRITE, ObjectIntent.created_at < began_before)
    return _turn(session, session.scalars(old.limit(most)).all())


def condemn(session: Session, key: str, *, project_id: str | None, subject: str, bytes: int = 0) -> None:
    """Record that an object is to be deleted, in the transaction that drops its reference.

    `perform` or a sweep deletes it. `subject` is the id of the resource it belonged to.
    """
    _condemn(session, key, DELETE, project_id, subject, bytes)


def condemn_prefix(session: Session, prefix: str, *, project_id: str | None, subject: str, bytes: int = 0) -> None:
    """Record that everything below a prefix is to be deleted."""
    _condemn(session, prefix, DELETE_PREFIX, project_id, subject, bytes)


def adopt_condemned(session: Session, most: int) -> None:
    """Adopt deletions that an older version, which may run at the same time, has recorded."""
    for row in session.scalars(select(CondemnedObject).limit(most).with_for_update(skip_locked=True)):
        condemn(session, row.storage_key, project_id=None, subject=row.storage_key.rpartition("/")[2])
        session.delete(row)


def has_deletions(session: Session, project_id: str | None, subject: str) -> bool:
    """Return True if bytes of a resource remain to be deleted."""
    is_owned = ObjectIntent.project_id.is_not_distinct_from(project_id)
    return session.scalar(_deletions(subject).where(is_owned).limit(1)) is not None


def deletions(session: Session, subject: str) -> Sequence[ObjectIntent]:
    """Return the outstanding deletions of a resource."""
    return session.scalars(_deletions(subject)).all()


def due_deletions(session: Session, most: int) -> Sequence[ObjectIntent]:
    """Return outstanding deletions of all resources, those with the fewest failures first."""
    due = select(ObjectIntent).where(ObjectIntent.kind != WRITE)
    return session.scalars(due.order_by(ObjectIntent.attempts, ObjectIntent.created_at).limit(most)).all()


def forget_deletion(session: Session, key: str) -> None:
    """Remove a deletion whose bytes are gone."""
    session.execute(delete(ObjectIntent).where(ObjectIntent.storage_key == key, ObjectIntent.kind != WRITE))


def note_failure(session: Session, key: str, error: str) -> None:
    """Record a failed attempt of a deletion."""
    is_it = (ObjectIntent.storage_key == key) & (ObjectIntent.kind != WRITE)
    session.execute(update(ObjectIntent).where(is_it).values(attempts=ObjectIntent.attempts + 1, last_error=error))


def _deletions(subject: str) -> Select[ObjectIntent]:
    return select(ObjectIntent).where(ObjectIntent.subject == subject, ObjectIntent.kind != WRITE)


def _turn(session: Session, keys: Iterable[str]) -> Sequence[ObjectIntent]:
    unnamed = ObjectIntent.storage_key.in_(list(keys)) & (ObjectIntent.kind == WRITE)
    turned = update(ObjectIntent).where(unnamed).values(kind=DELETE).returning(ObjectIntent)
    return session.scalars(turned.execution_options(synchronize_session=False)).all()


def _condemn(session: Session, key: str, kind: str, project_id: str | None, subject: str, bytes: int) -> None:
    """Insert or replace the intent of a key: two processes may condemn it, and the later one sets its subject."""
    values = {"kind": kind, "tenant_id": project_id, "subject": subject, "bytes": bytes}
    insert_ = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    added = insert_(_TABLE).values(storage_key=key, created_at=timestamp(), attempts=0, **values)
    session.execute(added.on_conflict_do_update(index_elements=["storage_key"], set_=values))


def _count(result: object) -> int:
    return result.rowcount if isinstance(result, CursorResult) else 0
