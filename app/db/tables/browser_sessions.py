"""Table of browser sessions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now


class BrowserSession(Base):
    """A browser that was signed in with a key; only the SHA-256 of its cookie is stored."""

    __tablename__ = "browser_sessions"

    digest: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(index=True)
