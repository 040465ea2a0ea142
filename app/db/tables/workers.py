"""The workers that are there, as they say themselves."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now


class WorkerRow(Base):
    """A worker process. Its row goes when it stops; of one that was killed it stays until it is pruned."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(primary_key=True)  # as in `Job.lease_owner`
    host: Mapped[str]
    version: Mapped[str]
    devices: Mapped[list[str]]  # what the driver shows; empty without a GPU
    troubles: Mapped[list[str]]  # what keeps it from jobs: disk, gpu, judge, models, storage
    started_at: Mapped[datetime] = mapped_column(default=utc_now)
    seen_at: Mapped[float]  # Unix seconds by the database's clock
