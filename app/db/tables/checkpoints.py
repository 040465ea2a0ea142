"""Tables of checkpoints, and of the projects that may see them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Json, new_id, utc_now
from app.db.tables.job_records import CheckpointSafety

KEPT = 3  # checkpoints kept per job, as at OpenAI; includes the final one
EPOCH, FINAL = "epoch", "final"  # kinds of checkpoints


class JobCheckpoint(Base):
    """The checkpoint of an epoch with its metrics, and its archive if its audit released it and it still exists.

    The `final` one, by default of the last epoch, has no archive of its own: its archive is the job's adapter. A row
    without a kind was saved by a timer in a version before 0.3, and is only a name with metrics.
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
    """A project that may see a checkpoint, as OpenAI's API records it."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (UniqueConstraint("job_id", "step", "project_id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("cp_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    project_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
