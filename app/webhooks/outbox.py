"""Queue webhook deliveries in the transaction that ends a job, so that both are committed or neither is."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.base import new_id
from app.db.tables import TERMINAL, Job, JobStatus, WebhookDelivery, WebhookEndpoint

TYPES = {status: f"fine_tuning.job.{status.value}" for status in TERMINAL}
AUDITED = "safety.audit.completed"


def announce(session: Session, job_id: str, status: JobStatus) -> None:
    """Queue the event that a job has ended."""
    _tell(session, job_id, TYPES[status])


def announce_audit(session: Session, job_id: str) -> None:
    """Queue the event that a job's audit has ended and its report is available."""
    _tell(session, job_id, AUDITED)


def _tell(session: Session, job_id: str, type: str) -> None:
    """Queue the event for every endpoint of the job's project that subscribes to it."""
    project_id = select(Job.project_id).where(Job.id == job_id).scalar_subquery()
    is_open = (WebhookEndpoint.project_id == project_id) & (WebhookEndpoint.status == "enabled")
    wanted = select(WebhookEndpoint).where(is_open).with_for_update(read=True, key_share=True)  # no deletion meanwhile
    # One id for all endpoints, by which a receiver of several of them recognizes the event.
    event_id = new_id("evt_")
    for endpoint in session.scalars(wanted):
        if type in endpoint.events:
            session.add(WebhookDelivery(endpoint_id=endpoint.id, event_id=event_id, type=type, job_id=job_id))
