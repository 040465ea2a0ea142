"""Count tokens that running requests have reserved; a reservation ends with the lease of its process."""

from __future__ import annotations

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from app.db import now
from app.db.tables import InferenceCall
from app.db.tables.inference import IS_RUNNING


def reserved_tokens(session: Session, project_id: str) -> int:
    """Return the tokens that a project's running requests have reserved but not yet written."""
    call = InferenceCall
    left = case((call.reserved_tokens > call.reply_tokens, call.reserved_tokens - call.reply_tokens), else_=0)
    runs = (call.project_id == project_id) & (call.lease_expires_at > now())
    return int(session.scalar(select(func.sum(left)).where(IS_RUNNING, runs)) or 0)
