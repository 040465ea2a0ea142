"""Table of wake-ups, which are sent after the commit that made them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now


class Outbox(Base):
    """A wake-up to send after the commit that made it; losing one costs a poll interval, not a job."""

    __tablename__ = "outbox"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    topic: Mapped[str]
    payload: Mapped[dict[str, object]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    sent_at: Mapped[datetime | None] = mapped_column(index=True)
