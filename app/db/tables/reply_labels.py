"""Tables of replies that people of the provider label: which were drawn, and each person's scores.

The texts stay in the transcripts of their jobs and are deleted with them.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now


class SampledReply(Base):
    """A drawn reply: the transcript `number` of a job.

    `stratum` and `population` are those of `spard.evaluation.calibration.labeling`; strata of two draws differ.
    """

    __tablename__ = "sampled_replies"
    __table_args__ = (UniqueConstraint("job_id", "number"), UniqueConstraint("model", "place"))

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("reply_"))
    model: Mapped[str]  # the base model's alias
    place: Mapped[int]  # order in which the replies of a model are shown, from 1
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int]
    stratum: Mapped[str]
    population: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ReplyLabel(Base):
    """One person's score of a reply, from 1 to 5; with `settles` it settles a disagreement."""

    __tablename__ = "reply_labels"

    reply_id: Mapped[str] = mapped_column(ForeignKey("sampled_replies.id"), primary_key=True)
    labeler: Mapped[str] = mapped_column(primary_key=True)  # the owner of the key, or the id of a key without one
    settles: Mapped[bool] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    score: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
