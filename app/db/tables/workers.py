"""The workers that are there, as they say themselves."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
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
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of its smallest GPU; None without one
    gpus: Mapped[int] = mapped_column(default=1, server_default="1")  # that share out a job's model
    seen_at: Mapped[float]  # Unix seconds by the database's clock
