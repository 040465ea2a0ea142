"""Intents as rows. Each change is one conditional statement, so that of two processes at one key only one succeeds."""

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
    """A write took so long that its bytes were given up; the same request may be sent again."""


@dataclass(frozen=True, slots=True)
class Planned:
    """An object that is about to be written: of which project, and of which file, upload or corpus.

    `bytes` count against the project meanwhile; more than `limit` are not written.
    """

    key: str
    project_id: str | None
    subject: str
    bytes: int = 0
    limit: int | None = None


def plan(session: Session, planned: Iterable[Planned]) -> None:
    """Note writes; to be committed before the first byte."""
    rows = [
        {"storage_key": each.key, "kind": WRITE, "project_id": each.project_id, "subject": each.subject}
        | {"bytes": each.bytes}
        for each in planned
    ]
    session.execute(insert(ObjectIntent), rows)


def resolve_named(session: Session, keys: Iterable[str]) -> None:
    """Resolve writes in the transaction whose rows name the objects; `GivenUp` if one was turned into a deletion."""
    for key in keys:
        ours = (ObjectIntent.storage_key == key) & (ObjectIntent.kind == WRITE)
        if _count(session.execute(delete(ObjectIntent).where(ours))) != 1:
            raise GivenUp("The request took too long, and what it stored was given up; send it again.")


def abandon_writes(session: Session, keys: Iterable[str]) -> Sequence[ObjectIntent]:
    """Turn writes that no transaction has named into deletions, and return these.

    A naming transaction that is still in flight holds the row: this waits for it, and then finds nothing to turn.
    """
    return _turn(session, keys)


def give_up_old(session: Session, age: timedelta, most: int) -> Sequence[ObjectIntent]:
    """Likewise for writes that began longer ago than any request takes: their process is gone."""
    began_before = session.scalars(select(timestamp())).one() - age
    old = select(ObjectIntent.storage_key).where(ObjectIntent.kind == WRITE, ObjectIntent.created_at < began_before)
    return _turn(session, session.scalars(old.limit(most)).all())


def condemn(session: Session, key: str, *, project_id: str | None, subject: str, bytes: int = 0) -> None:
    """Note that an object is to be deleted, in the transaction that forgets it; `perform` or a sweep deletes it."""
    _condemn(session, key, DELETE, project_id, subject, bytes)


def condemn_prefix(session: Session, prefix: str, *, project_id: str | None, subject: str, bytes: int = 0) -> None:
    """Condemn everything below a prefix."""
    _condemn(session, prefix, DELETE_PREFIX, project_id, subject, bytes)


def adopt_condemned(session: Session, most: int) -> None:
    """Take over what an older version, which may run beside this one, has left to be deleted."""
    for row in session.scalars(select(CondemnedObject).limit(most).with_for_update(skip_locked=True)):
        condemn(session, row.storage_key, project_id=None, subject=row.storage_key.rpartition("/")[2])
        session.delete(row)


def has_deletions(session: Session, project_id: str | None, subject: str) -> bool:
    """Return whether bytes of a resource are still to be deleted."""
    is_owned = ObjectIntent.project_id.is_not_distinct_from(project_id)
    return session.scalar(_deletions(subject).where(is_owned).limit(1)) is not None


def deletions(session: Session, subject: str) -> Sequence[ObjectIntent]:
    """Return the deletions of a resource that are still to be done."""
    return session.scalars(_deletions(subject)).all()


def due_deletions(session: Session, most: int) -> Sequence[ObjectIntent]:
    """Return deletions of all resources, those that failed least often first."""
    due = select(ObjectIntent).where(ObjectIntent.kind != WRITE)
    return session.scalars(due.order_by(ObjectIntent.attempts, ObjectIntent.created_at).limit(most)).all()


def forget_deletion(session: Session, key: str) -> None:
    """Forget a deletion whose bytes are gone."""
    session.execute(delete(ObjectIntent).where(ObjectIntent.storage_key == key, ObjectIntent.kind != WRITE))


def note_failure(session: Session, key: str, error: str) -> None:
    """Note that a deletion did not succeed."""
    is_it = (ObjectIntent.storage_key == key) & (ObjectIntent.kind != WRITE)
    session.execute(update(ObjectIntent).where(is_it).values(attempts=ObjectIntent.attempts + 1, last_error=error))


def _deletions(subject: str) -> Select[ObjectIntent]:
    return select(ObjectIntent).where(ObjectIntent.subject == subject, ObjectIntent.kind != WRITE)


def _turn(session: Session, keys: Iterable[str]) -> Sequence[ObjectIntent]:
    unnamed = ObjectIntent.storage_key.in_(list(keys)) & (ObjectIntent.kind == WRITE)
    turned = update(ObjectIntent).where(unnamed).values(kind=DELETE).returning(ObjectIntent)
    return session.scalars(turned.execution_options(synchronize_session=False)).all()


def _condemn(session: Session, key: str, kind: str, project_id: str | None, subject: str, bytes: int) -> None:
    """Two processes may condemn one key; the later one says of what it is."""
    values = {"kind": kind, "tenant_id": project_id, "subject": subject, "bytes": bytes}
    insert_ = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    added = insert_(_TABLE).values(storage_key=key, created_at=timestamp(), attempts=0, **values)
    session.execute(added.on_conflict_do_update(index_elements=["storage_key"], set_=values))


def _count(result: object) -> int:
    return result.rowcount if isinstance(result, CursorResult) else 0
