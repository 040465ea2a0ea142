"""What customers have taken back, and what became of it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base
from app.models import utc_now


class DeletedModel(Base):
    """A fine-tuned model that its owner has deleted; the job that made it stays as it ended."""

    __tablename__ = "deleted_models"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    deleted_at: Mapped[datetime] = mapped_column(default=utc_now)


class SweptJob(Base):
    """An ended job whose abandoned attempts are gone from storage."""

    __tablename__ = "swept_jobs"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    swept_at: Mapped[datetime] = mapped_column(default=utc_now)


class Tombstone(Base):
    """What stays of an erased job: how it ended, what it used, and digests. No job's row goes without one."""

    __tablename__ = "tombstones"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    erased_at: Mapped[datetime] = mapped_column(default=utc_now)
    status: Mapped[str]
    gpu_seconds: Mapped[float] = mapped_column(default=0.0)
    trained_tokens: Mapped[int | None] = mapped_column(BigInteger)
    digests: Mapped[dict[str, Any]]
