"""Checkpoints: the ends of a training's epochs, and who may know of them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Json, new_id, utc_now
from app.db.tables.job_records import CheckpointSafety

KEPT = 3  # checkpoints of a job, as OpenAI keeps them; the job's own is one of them
EPOCH, FINAL = "epoch", "final"  # kinds of checkpoints


class JobCheckpoint(Base):
    """The end of an epoch with its numbers; the archive of one that its audit released, if it still has one.

    One is `final`, that of the last epoch unless another was chosen: its archive is the job's adapter. Without a kind
    it is a step that a version before 0.3 had kept by the clock, a name and numbers only.
    """

    __tablename__ = "job_checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(default=lambda: new_id("ftckpt_"), unique=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    metrics: Mapped[dict[str, float | None]] = mapped_column(Json)
    kind: Mapped[str | None]
    safety: Mapped[CheckpointSafety | None] = mapped_column(Json)  # None: it was not audited
    storage_key: Mapped[str | None]
    sha256: Mapped[str | None]
    bytes: Mapped[int | None] = mapped_column(BigInteger)


class CheckpointPermission(Base):
    """A project that may know of a checkpoint, as OpenAI's API records it."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (UniqueConstraint("job_id", "step", "project_id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("cp_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    project_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
