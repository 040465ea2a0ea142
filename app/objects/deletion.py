"""Carry out deletions: at once in the request that asks for one, and later in the sweep if that failed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from secrets import token_hex

from sqlalchemy.exc import SQLAlchemyError

from app.db import Begin
from app.db.tables import ObjectIntent
from app.db.tables.objects import DELETE_PREFIX
from app.objects import intents
from app.storage import Storage, StorageError

log = logging.getLogger(__name__)

_AT_ONCE = 100
_WRITES_STAY = timedelta(days=1)  # longer than any request takes


def perform(storage: Storage, begin: Begin, subject: str) -> None:
    """Delete the remaining bytes of a resource; `subject` is its id.

    Raises `StorageError` while some remain, which the sweep deletes later. Only after this returns may the API confirm
    the deletion.
    """
    with begin() as session:
        due = intents.deletions(session, subject)
    for intent in due:
        execute_deletion(storage, begin, intent)


def discard(storage: Storage, begin: Begin, keys: Iterable[str], project_id: str | None, subject: str) -> None:
    """Delete objects that no row references any more; if storage or database fail, the sweep does it."""
    try:
        with begin() as session:
            for key in keys:
                intents.condemn(session, key, project_id=project_id, subject=subject)
        perform(storage, begin, subject)
    except (StorageError, SQLAlchemyError) as error:
        log.warning("bytes of %s are not deleted yet: %s", subject, type(error).__name__)


def sweep(storage: Storage, begin: Begin, writes_stay: timedelta = _WRITES_STAY, *, give_up: bool = True) -> None:
    """Give up writes of dead processes, unless `give_up` is False, and carry out up to a hundred deletions.

    `writes_stay` is the age at which a write counts as abandoned.
    """
    with begin() as session:
        # In a transaction of its own, so that a failure below does not undo it.
        intents.adopt_condemned(session, _AT_ONCE)
    with begin() as session:
        if give_up and (given_up := intents.give_up_old(session, writes_stay, _AT_ONCE)):
            log.warning("%d writes came to nothing: %s", len(given_up), [each.storage_key for each in given_up])
    with begin() as session:
        due = intents.due_deletions(session, _AT_ONCE)
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
            intents.note_failure(session, intent.storage_key, str(error))
        raise
    with begin() as session:
        intents.forget_deletion(session, intent.storage_key)


def probe(storage: Storage) -> None:
    """Write and delete an object; any fault of the storage is raised."""
    key = f"preflight/{token_hex(8)}"
    storage.write(key, [b"0"])
    storage.delete(key)
