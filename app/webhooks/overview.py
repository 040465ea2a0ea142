"""List and replay webhooks of all projects, for the provider."""

from __future__ import annotations

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.db.tables import WebhookDelivery, WebhookEndpoint
from app.errors import NotFound
from app.http.pagination import Page, page
from app.webhooks import service
from app.webhooks.schemas import EndpointOverview

_STATES = ("pending", "delivered", "failed")


def endpoints(session: Session) -> list[EndpointOverview]:
    """Return the endpoints of all projects with counts of their deliveries, newest first."""
    counts = [func.coalesce(func.sum(case((WebhookDelivery.status == each, 1), else_=0)), 0) for each in _STATES]
    query = select(WebhookEndpoint, *counts).outerjoin(
        WebhookDelivery, WebhookDelivery.endpoint_id == WebhookEndpoint.id
    )
    ordered = query.group_by(WebhookEndpoint.id).order_by(WebhookEndpoint.created_at.desc(), WebhookEndpoint.id)
    return [
        EndpointOverview(
            id=each.id,
            created_at=each.created_at,
            url=each.url,
            events=each.events,
            status=each.status,
            project_id=each.project_id,
            pending=pending,
            delivered=delivered,
            failed=failed,
        )
        for each, pending, delivered, failed in session.execute(ordered)
    ]


def deliveries(session: Session, status: str | None, after: str | None, limit: int) -> Page[WebhookDelivery]:
    """Return a page of the deliveries to all endpoints, newest first, of one status or any."""
    query = select(WebhookDelivery)
    if status is not None:
        query = query.where(WebhookDelivery.status == status)
    of_any_status = select(WebhookDelivery.created_at).where(WebhookDelivery.id == after)
    return page(session, query, WebhookDelivery, after, limit, ascending=False, left=(of_any_status,))


def replay(session: Session, delivery_id: str) -> WebhookDelivery:
    """Send an event of any project again; it keeps its id."""
    query = select(WebhookDelivery.endpoint_id, WebhookEndpoint.project_id).where(WebhookDelivery.id == delivery_id)
    found = session.execute(query.join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)).first()
    if found is None:
        message = f"No such webhook delivery: {delivery_id}"
        raise NotFound(message, code="webhook_delivery_not_found", param="delivery_id")
    endpoint_id, project_id = found
    delivery = service.replay(session, project_id, endpoint_id, delivery_id)
    audit_log.record(session, "webhook_delivery.replayed", delivery.id, project=project_id)
    return delivery
