"""Where a job's training went on after an attempt that ended early: told by its worker as an event, read for plots."""

from __future__ import annotations

import re

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.tables import JobEvent

WORDS = "Training goes on after step"


def steps(session: Session, job_id: str) -> list[int]:
    """Return the last step before each restart, in the order of the restarts."""
    told = (JobEvent.job_id == job_id) & (JobEvent.type == "message") & JobEvent.message.startswith(f"{WORDS} ")
    messages = session.scalars(select(JobEvent.message).where(told).order_by(JobEvent.seq))
    return [int(found[1]) for text in messages if (found := re.fullmatch(rf"{WORDS} (\d{{1,9}})", text))]
