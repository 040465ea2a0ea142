"""Tables of files, of uploads in parts, and of objects that an older version left for deletion."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Json, new_id, utc_now

FINE_TUNE = "fine-tune"  # the purpose of files to train on
RESULTS = "fine-tune-results"  # the purpose of files that a job has made
PREFERENCE = "preference"  # the row format of files for the method dpo


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
