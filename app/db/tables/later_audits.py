"""Table of later audits: today's audit of models that were released before."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now

WHOLE_JOB = 0  # the `step` of a job's model, as opposed to a checkpoint


class LaterAudit(Base):
    """One later audit of a released model, or of its checkpoint at a step; the newest decided one is in force.

    A job of the provider's own project runs it. `record` holds the signed bytes.
    """

    __tablename__ = "later_audits"
    __table_args__ = (UniqueConstraint("job_id", "step", "round"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("audit_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int] = mapped_column(default=WHOLE_JOB)
    round: Mapped[int]  # 1 for the first later audit of the model
    audit_version: Mapped[int]
    audit_job_id: Mapped[str | None] = mapped_column(index=True)  # None: it could not be run
    asked_by: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    decided_at: Mapped[datetime | None] = mapped_column(index=True)
    decision: Mapped[str | None]  # pass | fail | inconclusive
    reasons: Mapped[list[str] | None]
    record: Mapped[str | None]
    signature: Mapped[dict[str, str] | None]
