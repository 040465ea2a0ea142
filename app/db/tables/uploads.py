"""Tables of files that are uploaded in parts."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now


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
