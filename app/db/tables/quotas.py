"""Table of project quotas."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base


class Quota(Base):
    """A project's limits; null means unlimited, except for requests, where the deployment's limit applies."""

    __tablename__ = "quotas"

    project_id: Mapped[str] = mapped_column("tenant_id", ForeignKey("tenants.id"), primary_key=True)
    max_file_bytes: Mapped[int | None] = mapped_column(BigInteger)  # over all its training files
    max_file_rows: Mapped[int | None] = mapped_column(BigInteger)  # likewise
    max_jobs_per_day: Mapped[int | None]
    max_unfinished_jobs: Mapped[int | None]
    max_gpu_seconds: Mapped[float | None]  # of jobs created in the last 30 days
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]  # prompts and replies together
    max_tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)  # likewise, in any 24 hours
    weight: Mapped[float | None]  # scheduling weight; None: 1
