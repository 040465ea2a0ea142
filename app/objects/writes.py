"""Write objects between their intent and the transaction that references them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import Begin
from app.errors import QuotaExceeded
from app.objects import intents
from app.objects.deletion import execute_deletion
from app.objects.intents import Planned
from app.storage import Storage, StorageError, Stored

log = logging.getLogger(__name__)


class Writing:
    """Planned objects: `write` stores them, and `keep` references them in a transaction."""

    def __init__(self, storage: Storage, planned: Iterable[Planned]) -> None:
        self._storage = storage
        self._planned = {each.key: each for each in planned}
        self.unnamed = set(self._planned)

    def write(self, key: str, chunks: Iterable[bytes]) -> Stored:
        """Write a planned object; raise `QuotaExceeded` if it exceeds its limit."""
        return self._storage.write(key, _limit_bytes(self._planned[key].limit, chunks))

    def keep(self, session: Session, *keys: str) -> None:
        """Mark objects as referenced by rows of this transaction; raise `GivenUp` if a sweep was faster."""
        intents.resolve_named(session, keys)
        self.unnamed -= set(keys)


@contextmanager
def writing(storage: Storage, begin: Begin, plan: Callable[[Session], Sequence[Planned]]) -> Iterator[Writing]:
    """Commit the intents that `plan` returns; at the end, delete objects that no committed transaction references.

    The intents decide that, not our view of a COMMIT: one whose answer was lost may have succeeded.

        with writing(storage, begin, plan) as found:
            found.write(key, chunks)
            with begin() as session:
                found.keep(session, key)
                session.add(row)
    """
    planned: Sequence[Planned] = ()
    try:
        with begin() as session:
            planned = plan(session)
            intents.plan(session, planned)
        writes = Writing(storage, planned)
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
            intents.condemn(session, lost, project_id=None, subject=lost.rpartition("/")[2])


def _delete_unnamed(storage: Storage, begin: Begin, keys: Collection[str]) -> None:
    """Delete unreferenced objects; the sweep repeats the deletions that fail."""
    try:
        with begin() as session:
            given_up = intents.abandon_writes(session, keys)
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
