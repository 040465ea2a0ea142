"""Objects of the storage that no other row names yet, or any more, and what a comparison with the rows has found."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base
from app.db.session import timestamp

WRITE = "write"  # will be named by a row, or deleted
DELETE = "delete"
DELETE_PREFIX = "delete_prefix"  # everything below the key


class ObjectIntent(Base):
    """An object that is being written or deleted: the row is there before the bytes, and until they are gone."""

    __tablename__ = "object_intents"
    __table_args__ = (Index("ix_object_intents_tenant_id", "tenant_id"),)

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    project_id: Mapped[str | None] = mapped_column("tenant_id")  # None: the provider's
    subject: Mapped[str] = mapped_column(index=True)  # the id of what the bytes are or were of: a file, an upload, ...
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)  # at most; 0 where somebody else counts them
    created_at: Mapped[datetime] = mapped_column(default=timestamp())
    attempts: Mapped[int] = mapped_column(default=0)  # to delete it, that failed
    last_error: Mapped[str | None]


class ObjectFinding(Base):
    """What rows and storage did not agree on when they were compared last."""

    __tablename__ = "object_findings"

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # unexplained: an object without a row | missing: a row without its object
    why: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    first_seen_at: Mapped[datetime] = mapped_column(default=timestamp())
    last_seen_at: Mapped[datetime] = mapped_column(default=timestamp())


class ObjectMark(Base):
    """The one row that ties this database to its storage, where an object of the same content stands beside it.

    An object that is ahead of the row tells that the database was restored from a backup.
    """

    __tablename__ = "object_marks"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    database_id: Mapped[str]
    generation: Mapped[int] = mapped_column(BigInteger)
    marked_at: Mapped[datetime]
    checked_at: Mapped[datetime | None]  # the last comparison
    restored_from: Mapped[datetime | None]  # the last mark of the backup; objects of after it are left alone
    other_database: Mapped[str | None]  # whose mark stands in the storage, if not ours
