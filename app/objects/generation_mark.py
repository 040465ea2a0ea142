"""Mark the database and the storage with a shared generation number, to detect that they do not belong together.

The database's mark is raised first. A storage mark that is ahead means that the database was restored from a backup; a
mark of another database means that two installations share the storage.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db import Begin, timestamp
from app.db.base import new_id
from app.db.tables import ObjectMark
from app.storage import ObjectMissing, Storage

log = logging.getLogger(__name__)

KEY = "spard-mark.json"
NEWER = "newer than the backup that the database was restored from"
_ROW = 1
_EVERY = timedelta(hours=1)
_SKEW = timedelta(hours=1)  # between the clocks of database and storage


@dataclass(frozen=True, slots=True)
class _Found:
    """The mark in the storage."""

    database_id: str
    generation: int


def renew(storage: Storage, begin: Begin) -> ObjectMark:
    """Compare both marks and raise them; a mismatch stays recorded in the row until `accept` is called.

    If the storage has another database's mark, neither is raised.
    """
    found = _read(storage)
    with begin() as session:
        mark, now = _row(session), session.scalars(select(timestamp())).one()
        mark.other_database = None
        if found and found.database_id != mark.database_id:
            mark.other_database = found.database_id
            log.warning("the storage is marked by another database: %s", found.database_id)
            return mark
        if found and found.generation > mark.generation:
            # The first finding stays: later marks of the restored database do not tell when the backup was made.
            mark.restored_from = mark.restored_from or mark.marked_at
            log.warning("the database is older than the storage: of %s; was it restored?", mark.restored_from)
        mark.generation = max(mark.generation, found.generation if found else 0) + 1
        mark.marked_at = now
    _write(storage, mark)
    return mark


def renew_if_due(storage: Storage, begin: Begin) -> ObjectMark:
    """Renew the marks if an hour has passed."""
    with begin() as session:
        mark, now = _row(session), session.scalars(select(timestamp())).one()
        is_due = mark.generation == 0 or mark.marked_at < now - _EVERY
    return renew(storage, begin) if is_due else mark


def accept(storage: Storage, begin: Begin) -> None:
    """Accept the database, restored or different, as the right one from now on."""
    found = _read(storage)
    with begin() as session:
        mark = _row(session)
        mark.restored_from = mark.other_database = None
        mark.generation = max(mark.generation, found.generation if found else 0) + 1
        mark.marked_at = session.scalars(select(timestamp())).one()
    _write(storage, mark)


def why_protected(mark: ObjectMark, modified_at: datetime) -> str | None:
    """Return why an object without a row may belong to another or newer database; None if it cannot."""
    if mark.other_database is not None:
        return f"the storage is marked by another database, {mark.other_database}"
    if mark.restored_from is not None and modified_at > mark.restored_from - _SKEW:
        return NEWER
    return None


def is_trusted(mark: ObjectMark) -> bool:
    """Return True if nothing suggests that database and storage do not belong together."""
    return mark.restored_from is None and mark.other_database is None


def claim_check(session: Session, every: timedelta) -> bool:
    """Return True if a comparison of rows and storage is due; only one of several processes gets True."""
    mark, now = _row(session), session.scalars(select(timestamp())).one()
    if mark.checked_at is not None and mark.checked_at > now - every:
        return False
    mark.checked_at = now
    return True


def _row(session: Session) -> ObjectMark:
    """Return the row, locked; it is created at its first use."""
    mark = session.get(ObjectMark, _ROW, with_for_update=True)
    if mark is None:
        now = session.scalars(select(timestamp())).one()
        mark = ObjectMark(id=_ROW, database_id=new_id("db_"), generation=0, marked_at=now)
        session.add(mark)
        session.flush()
    return mark


def _read(storage: Storage) -> _Found | None:
    try:
        text = b"".join(storage.chunks(KEY))
    except ObjectMissing:
        return None
    with suppress(ValueError, TypeError, KeyError):
        content = json.loads(text)
        return _Found(str(content["database_id"]), int(content["generation"]))
    return _Found("unreadable", 0)


def _write(storage: Storage, mark: ObjectMark) -> None:
    content = {"database_id": mark.database_id, "generation": mark.generation}
    storage.write(KEY, [json.dumps(content).encode()])
