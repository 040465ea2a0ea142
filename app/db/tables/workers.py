"""Tables of the workers, as they report themselves, and of wake-ups, which are sent after the commit that made them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now

PRESENCE_EVERY_S = 30.0  # the longest time between two writes of a running worker's `seen_at`
# A worker that was seen within this time is alive. The limit does not depend on the length of leases, which providers
# set: a long lease would make a worker that is gone look alive, or one that is there look gone.
ALIVE_S = 3 * PRESENCE_EVERY_S


class WorkerRow(Base):
    """A worker process; its row is deleted when it stops, or pruned later if it was killed."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(primary_key=True)  # as in `Job.lease_owner`
    host: Mapped[str]
    version: Mapped[str]
    devices: Mapped[list[str]]  # GPU names as the driver reports them; empty without a GPU
    troubles: Mapped[list[str]]  # what keeps it from jobs: disk, gpu, judge, models, storage
    started_at: Mapped[datetime] = mapped_column(default=utc_now)
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of its smallest GPU; None without one
    gpus: Mapped[int] = mapped_column(default=1, server_default="1")  # over which a job's model is sharded
    seen_at: Mapped[float]  # Unix seconds by the database's clock


class Outbox(Base):
    """A wake-up to send after the commit that made it; losing one costs a poll interval, not a job."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    topic: Mapped[str]
    payload: Mapped[dict[str, object]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    sent_at: Mapped[datetime | None] = mapped_column(index=True)
