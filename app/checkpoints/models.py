"""Steps of trainings, and who may know of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base
from app.models import new_id, utc_now


class JobCheckpoint(Base):
    """A step at which the training could have gone on, with its numbers; its weights are never served."""

    __tablename__ = "job_checkpoints"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(default=lambda: new_id("ftckpt_"), unique=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    metrics: Mapped[dict[str, Any]]


class CheckpointPermission(Base):
    """A project that may know of a checkpoint, as OpenAI's API records it."""

    __tablename__ = "checkpoint_permissions"
    __table_args__ = (UniqueConstraint("job_id", "step", "project_id"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("cp_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    project_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
