"""Tables of files and uploads, of storage objects that no other row references, and of positions of deleted rows."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Json, new_id, utc_now
from app.db.session import timestamp

FINE_TUNE = "fine-tune"  # the purpose of files to train on
RESULTS = "fine-tune-results"  # the purpose of files that a job has made
PREFERENCE = "preference"  # the row format of files for the method dpo
WRITE = "write"  # a row will reference it, or it is deleted
DELETE = "delete"
DELETE_PREFIX = "delete_prefix"  # everything below the key


class File(Base):
    """An uploaded or produced file; its bytes are in storage under `storage_key`."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant_id_created_at", "tenant_id", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("file-"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    storage_key: Mapped[str]
    status: Mapped[str]  # processed | error
    status_details: Mapped[str | None]
    rows: Mapped[int | None]
    problems: Mapped[list[dict[str, Any]] | None] = mapped_column(Json)
    findings: Mapped[list[dict[str, object]] | None] = mapped_column(Json)  # each fault once; None for older files
    tool_lines: Mapped[dict[str, int] | None] = mapped_column(Json)  # first line with `tools`, `tool_calls`, `tool`
    row_format: Mapped[str | None]  # chat | completion | preference; None for older files, and without rows
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None]


class CondemnedObject(Base):
    """The bytes of a file that an older version deleted; this version makes an `ObjectIntent` of each."""

    __tablename__ = "condemned_objects"

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Upload(Base):
    """A file that is uploaded in parts; after completion it is a `File`."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("upload_"))
    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"))
    filename: Mapped[str]
    purpose: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(default="pending")  # pending | completed | cancelled | expired
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(index=True)
    file_expires_after_s: Mapped[int | None]
    part_ids: Mapped[list[str] | None]  # of the completed file, so that a repeated request gets the same answer
    file_id: Mapped[str | None]


class UploadPart(Base):
    """A part of an upload; its bytes are in storage until the upload ends."""

    __tablename__ = "upload_parts"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("part_"))
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), index=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    storage_key: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


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


class DeletedPlace(Base):
    """The list position of a deleted row, so that a client's cursor stays valid. Jobs leave a `Tombstone`."""

    __tablename__ = "deleted_places"

    id: Mapped[str] = mapped_column(primary_key=True)  # the deleted row's id
    list_id: Mapped[str]  # the list's owner: a project, job or checkpoint
    created_at: Mapped[datetime]  # when the row was created
    deleted_at: Mapped[datetime] = mapped_column(default=timestamp(), index=True)
