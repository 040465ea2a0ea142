"""Tables of storage objects that no other row references yet or any more, and of comparison results."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base
from app.db.session import timestamp

WRITE = "write"  # a row will reference it, or it is deleted
DELETE = "delete"
DELETE_PREFIX = "delete_prefix"  # everything below the key


class ObjectIntent(Base):
    """An object that is being written or deleted; the row exists before its bytes, until they are gone."""

    __tablename__ = "object_intents"
    __table_args__ = (Index("ix_object_intents_tenant_id", "tenant_id"),)

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    project_id: Mapped[str | None] = mapped_column("tenant_id")  # None: the provider's
    subject: Mapped[str] = mapped_column(index=True)  # the id of the bytes' owner: a file, an upload, ...
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # at most; 0 if they are counted elsewhere
    created_at: Mapped[datetime] = mapped_column(default=timestamp())
    attempts: Mapped[int] = mapped_column(default=0)  # failed attempts to delete it
    last_error: Mapped[str | None]


class ObjectFinding(Base):
    """A difference between rows and storage that the last comparison found."""

    __tablename__ = "object_findings"

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # unexplained: an object without a row | missing: a row without its object
    why: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    first_seen_at: Mapped[datetime] = mapped_column(default=timestamp())
    last_seen_at: Mapped[datetime] = mapped_column(default=timestamp())


class ObjectMark(Base):
    """The one row that ties this database to its storage, which contains an object with the same content.

    If the object is ahead of the row, the database was restored from a backup.
    """

    __tablename__ = "object_marks"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    database_id: Mapped[str]
    generation: Mapped[int] = mapped_column(BigInteger)
    marked_at: Mapped[datetime]
    checked_at: Mapped[datetime | None]  # the last comparison
    restored_from: Mapped[datetime | None]  # time of the backup's last mark; newer objects are not touched
    other_database: Mapped[str | None]  # the database whose mark is in the storage, if not ours
