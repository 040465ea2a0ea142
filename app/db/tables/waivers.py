"""Tables of adapters that the gate held back, and of waivers."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now


class HeldAdapter(Base):
    """A signed archive that no route serves unless a waiver releases it."""

    __tablename__ = "held_adapters"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    storage_key: Mapped[str]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Waiver(Base):
    """A waiver, proposed by one admin key; in force once another key has approved it, until it expires."""

    __tablename__ = "waivers"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("waiver_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    reason: Mapped[str]
    expires_at: Mapped[datetime]
    proposed_by: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    approved_by: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"))
    approved_at: Mapped[datetime | None]
    record: Mapped[str | None]  # the signed bytes
    signature: Mapped[dict[str, str] | None]
