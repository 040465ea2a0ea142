"""Table of policy versions; rows are added and never changed."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, utc_now


class PolicyVersion(Base):
    """One version; the highest is in force, and every job keeps the version that it was created under."""

    __tablename__ = "policy_versions"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    created_by: Mapped[str]  # a key's id
    content: Mapped[dict[str, object]]  # app.policies.schemas.Policy as JSON
