"""Audits of models that were released before: today's questions asked of weights that nobody trains again."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now

WHOLE_JOB = 0  # the step of what a job has made, which has no number here


class LaterAudit(Base):
    """One audit of a released model, or of a checkpoint at a step; the last one that has decided holds.

    A job of the provider's own project asks it. `record` are the bytes that were signed.
    """

    __tablename__ = "later_audits"
    __table_args__ = (UniqueConstraint("job_id", "step", "round"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("audit_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int] = mapped_column(default=WHOLE_JOB)
    round: Mapped[int]  # 1 for the first later audit of the model
    audit_version: Mapped[int]
    audit_job_id: Mapped[str | None] = mapped_column(index=True)  # None: it could not be asked
    asked_by: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    decided_at: Mapped[datetime | None] = mapped_column(index=True)
    decision: Mapped[str | None]  # pass | fail | inconclusive
    reasons: Mapped[list[str] | None]
    record: Mapped[str | None]
    signature: Mapped[dict[str, str] | None]
