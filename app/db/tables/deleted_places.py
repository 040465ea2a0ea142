"""Places in lists whose rows were deleted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now


class DeletedPlace(Base):
    """Where a deleted row stood in its list: who has read so far goes on from there. Jobs leave a `Tombstone`."""

    __tablename__ = "deleted_places"

    id: Mapped[str] = mapped_column(primary_key=True)  # the row's
    list_id: Mapped[str]  # of whom or what the list is: a project, a job, a checkpoint
    created_at: Mapped[datetime]  # when the row was
    deleted_at: Mapped[datetime] = mapped_column(default=utc_now, index=True)
