"""Objects on their way out."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base
from app.models import utc_now


class CondemnedObject(Base):
    """The bytes of a file that is no more, noted with its deletion: a crash in between leaves nothing behind."""

    __tablename__ = "condemned_objects"

    storage_key: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
