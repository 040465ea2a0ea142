"""Store intents, write objects under them, and carry out deletions.

Each change of an intent is one conditional statement, so of two processes at one key only one succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex

from sqlalchemy import CursorResult, Select, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import Begin, timestamp
from app.db.base import Base
from app.db.tables import CondemnedObject, ObjectIntent
from app.db.tables.files import DELETE, DELETE_PREFIX, WRITE
from app.errors import QuotaExceeded, Unavailable
from app.storage import Storage, StorageError, StoredObject

_TABLE = Base.metadata.tables[ObjectIntent.__tablename__]


class GivenUp(Unavailable):
    """A write took so long that its bytes were given up; the client may send the request again."""


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object about to be written: its key, project, and the file, upload or corpus it belongs to.

    `bytes` count against the project's quota until the write ends; at most `limit` bytes are written.
    """

    key: str
    project_id: str | None
    subject: str
    bytes: int = 0
    limit: int | None = None


def plan_writes(session: Session, planned: Iterable[PlannedObject]) -> None:
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
    """Turn the intents of writes that no transaction has referenced into deletions, and return the deletions.

    A referencing transaction in flight holds the row: this waits for it, and then finds nothing to turn.
    """
    return _turn(session, keys)


def give_up_old(session: Session, age: timedelta, most: int) -> Sequence[ObjectIntent]:
    """Turn intents of writes older than `age`, whose process must be dead, into deletions; at most `most`."""
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
    """Take over the deletions recorded by an older version of the service, which may run at the same time."""
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
    """Remove the intent of a deletion after the bytes are deleted."""
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


# Carry out deletions: at once in the request that asks for one, and later in the sweep if that failed.

log = logging.getLogger(__name__)

_AT_ONCE = 100
_WRITES_STAY = timedelta(days=1)  # longer than any request takes


def perform(storage: Storage, begin: Begin, subject: str) -> None:
    """Delete the remaining bytes of a resource; `subject` is its id.

    Raises `StorageError` while some remain, which the sweep deletes later. Only after this returns may the API confirm
    the deletion.
    """
    with begin() as session:
        due = deletions(session, subject)
    for intent in due:
        execute_deletion(storage, begin, intent)


def discard(storage: Storage, begin: Begin, keys: Iterable[str], project_id: str | None, subject: str) -> None:
    """Delete objects that no row references any more; if storage or database fail, the sweep does it."""
    try:
        with begin() as session:
            for key in keys:
                condemn(session, key, project_id=project_id, subject=subject)
        perform(storage, begin, subject)
    except (StorageError, SQLAlchemyError) as error:
        log.warning("bytes of %s are not deleted yet: %s", subject, type(error).__name__)


def sweep(storage: Storage, begin: Begin, writes_stay: timedelta = _WRITES_STAY, *, give_up: bool = True) -> None:
    """Give up writes of dead processes, unless `give_up` is False, and carry out up to a hundred deletions.

    `writes_stay` is the age at which a write counts as abandoned.
    """
    with begin() as session:
        # In a transaction of its own, so that a failure below does not undo it.
        adopt_condemned(session, _AT_ONCE)
    with begin() as session:
        if give_up and (given_up := give_up_old(session, writes_stay, _AT_ONCE)):
            log.warning("%d writes came to nothing: %s", len(given_up), [each.storage_key for each in given_up])
    with begin() as session:
        due = due_deletions(session, _AT_ONCE)
    for intent in due:
        try:
            execute_deletion(storage, begin, intent)
        except StorageError as error:
            log.warning("%s is not deleted yet: %s", intent.storage_key, error)


def execute_deletion(storage: Storage, begin: Begin, intent: ObjectIntent) -> None:
    """Delete an intent's bytes, then the intent; safe to run in several processes at the same time."""
    try:
        delete = storage.delete_prefix if intent.kind == DELETE_PREFIX else storage.delete
        delete(intent.storage_key)
    except StorageError as error:
        # The storage's error matters more than a failure to count it.
        with suppress(SQLAlchemyError), begin() as session:
            note_failure(session, intent.storage_key, str(error))
        raise
    with begin() as session:
        forget_deletion(session, intent.storage_key)


def probe(storage: Storage) -> None:
    """Write and delete an object, and raise any error of the storage."""
    key = f"preflight/{token_hex(8)}"
    storage.write(key, [b"0"])
    storage.delete(key)


# Write objects between their intent and the transaction that references them.


class ObjectWriter:
    """Planned objects: `write` stores them, and `keep` references them in a transaction."""

    def __init__(self, storage: Storage, planned: Iterable[PlannedObject]) -> None:
        self._storage = storage
        self._planned = {each.key: each for each in planned}
        self.unnamed = set(self._planned)

    def write(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Write a planned object; raise `QuotaExceeded` if it exceeds its limit."""
        return self._storage.write(key, _limit_bytes(self._planned[key].limit, chunks))

    def keep(self, session: Session, *keys: str) -> None:
        """Mark objects as referenced by rows of this transaction; raise `GivenUp` if a sweep was faster."""
        resolve_named(session, keys)
        self.unnamed -= set(keys)


@contextmanager
def writing(
    storage: Storage, begin: Begin, plan: Callable[[Session], Sequence[PlannedObject]]
) -> Iterator[ObjectWriter]:
    """Commit the intents that `plan` returns; at the end, delete objects that no committed transaction references.

    The intents decide that, not our view of a COMMIT: one whose answer was lost may have succeeded.

        with writing(storage, begin, plan) as found:
            found.write(key, chunks)
            with begin() as session:
                found.keep(session, key)
                session.add(row)
    """
    planned: Sequence[PlannedObject] = ()
    try:
        with begin() as session:
            planned = plan(session)
            plan_writes(session, planned)
        writes = ObjectWriter(storage, planned)
        yield writes
    except BaseException:
        _delete_unnamed(storage, begin, [each.key for each in planned])
        raise
    if writes.unnamed:
        _delete_unnamed(storage, begin, writes.unnamed)


def give_back(storage: Storage, begin: Begin, source: str, lost: str, is_named: Callable[[Session], bool]) -> None:
    """Move an object to the key of a lost one that a row references.

    `is_named` returns True if the row still exists, and locks it; if it is gone, the object is deleted.
    """
    # Another process, or the same request sent twice, may have restored it already.
    if storage.exists(lost):
        return
    log.warning("%s was lost and is given back", lost)
    storage.move(source, lost)
    with begin() as session:
        if not is_named(session):
            condemn(session, lost, project_id=None, subject=lost.rpartition("/")[2])


def _delete_unnamed(storage: Storage, begin: Begin, keys: Collection[str]) -> None:
    """Delete unreferenced objects; the sweep repeats the deletions that fail."""
    try:
        with begin() as session:
            given_up = abandon_writes(session, keys)
        for intent in given_up:
            execute_deletion(storage, begin, intent)
    except (StorageError, SQLAlchemyError) as error:
        log.warning("left to the sweep: %s: %s", ", ".join(keys), type(error).__name__)


def _limit_bytes(limit: int | None, chunks: Iterable[bytes]) -> Iterator[bytes]:
    left = limit
    for chunk in chunks:
        if left is not None:
            left -= len(chunk)
            if left < 0:
                message = f"Your project has only {limit} bytes of storage left. Ask the provider for more."
                raise QuotaExceeded(message)
        yield chunk
