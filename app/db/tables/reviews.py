"""Tables of what people decide about a job's results: waivers of held-back adapters, and labels of replies.

The texts of labeled replies stay in the transcripts of their jobs and are deleted with them.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, new_id, utc_now


class HeldAdapter(Base):
    """A signed archive that no route serves unless a waiver releases it."""

    __tablename__ = "held_adapters"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    storage_key: Mapped[str]
    sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class Waiver(Base):
    """A waiver, proposed by one admin key; in force once another key has approved it, until it expires."""

    __tablename__ = "waivers"

    id: Mapped[str] = mapped_column(primary_key=True, default=lambda: new_id("waiver_"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    reason: Mapped[str]
    expires_at: Mapped[datetime]
    proposed_by: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    approved_by: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"))
    approved_at: Mapped[datetime | None]
    record: Mapped[str | None]  # the signed bytes
    signature: Mapped[dict[str, str] | None]


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
