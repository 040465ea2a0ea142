"""Decide who may download an adapter that did not pass the safety gate."""

from __future__ import annotations

from sqlalchemy.orm import Session

from app import db
from app.db.tables import Job
from app.db.tables.job_records import SafetySummary
from app.errors import Forbidden
from app.keys.service import Principal


def check(session: Session, caller: Principal, job: Job) -> None:
    """Raise Forbidden unless the adapter passed its gate, a waiver is in force, or the caller is the provider."""
    summary = job.safety or SafetySummary()
    if waiver := summary.get("waiver"):
        if waiver["expires_at"] <= db.clock(session).timestamp():
            raise Forbidden(f"The waiver that released the adapter of {job.id} has expired.", code="waiver_expired")
    elif not ("gate" in summary and summary["gate"]["decision"] == "pass") and "admin" not in caller.scopes:
        raise Forbidden("This adapter was released to the provider only.", code="not_published")
