"""Tokens that running requests may still write: they count for the next request, and end with their process's lease."""

from __future__ import annotations

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from app.db import now
from app.db.tables import InferenceCall
from app.db.tables.inference import IS_RUNNING


def reserved_tokens(session: Session, project_id: str) -> int:
    """Return the tokens that requests of a project have reserved beyond those that they have written."""
    call = InferenceCall
    left = case((call.reserved_tokens > call.reply_tokens, call.reserved_tokens - call.reply_tokens), else_=0)
    runs = (call.project_id == project_id) & (call.lease_expires_at > now())
    return int(session.scalar(select(func.sum(left)).where(IS_RUNNING, runs)) or 0)
