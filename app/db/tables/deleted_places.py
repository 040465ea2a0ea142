"""Table of list positions of deleted rows."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now


class DeletedPlace(Base):
    """The list position of a deleted row, so that a client's cursor stays valid. Jobs leave a `Tombstone`."""

    __tablename__ = "deleted_places"

    id: Mapped[str] = mapped_column(primary_key=True)  # the deleted row's id
    list_id: Mapped[str]  # the list's owner: a project, job or checkpoint
    created_at: Mapped[datetime]  # when the row was created
    deleted_at: Mapped[datetime] = mapped_column(default=utc_now, index=True)
