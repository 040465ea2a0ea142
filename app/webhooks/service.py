"""Endpoints and deliveries as rows; every query is within one tenant."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.errors import InvalidState, NotFound
from app.models import Tenant, utc_now
from app.pages import Page, page
from app.webhooks import signing
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.schemas import EndpointCreate

_MAX_ENDPOINTS = 10
_BOTH_VALID = timedelta(hours=24)


def create(session: Session, tenant_id: str, ask: EndpointCreate) -> WebhookEndpoint:
    """A new endpoint for an address that was checked."""
    session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update())
    if (session.scalar(select(func.count()).select_from(_of(tenant_id).subquery())) or 0) >= _MAX_ENDPOINTS:
        raise InvalidState(f"There are {_MAX_ENDPOINTS} endpoints already; delete one.", code="too_many_endpoints")
    endpoint = WebhookEndpoint(tenant_id=tenant_id, url=ask.url, events=list(ask.events), secret=signing.new_secret())
    session.add(endpoint)
    session.flush()
    audit_log.record(session, "webhook_endpoint.created", endpoint.id, host=urlsplit(endpoint.url).hostname)
    return endpoint


def list_endpoints(session: Session, tenant_id: str) -> Sequence[WebhookEndpoint]:
    return session.scalars(_of(tenant_id).order_by(WebhookEndpoint.created_at.desc(), WebhookEndpoint.id)).all()


def get(session: Session, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
    """The tenant's endpoint, locked; somebody else's reads as unknown."""
    endpoint = session.scalar(_of(tenant_id).where(WebhookEndpoint.id == endpoint_id).with_for_update())
    if endpoint is None:
        message = f"No such webhook endpoint: {endpoint_id}"
        raise NotFound(message, code="webhook_endpoint_not_found", param="endpoint_id")
    return endpoint


def remove(session: Session, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Forget an endpoint and what was on its way to it."""
    endpoint = get(session, tenant_id, endpoint_id)
    session.execute(delete(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint.id))
    session.delete(endpoint)
    audit_log.record(session, "webhook_endpoint.deleted", endpoint.id)
    return endpoint


def rotate(session: Session, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
    """A new secret; for a day the one before signs too, so that no receiver misses an event."""
    endpoint = get(session, tenant_id, endpoint_id)
    endpoint.old_secret, endpoint.old_secret_until = endpoint.secret, utc_now() + _BOTH_VALID
    endpoint.secret = signing.new_secret()
    session.flush()
    audit_log.record(session, "webhook_endpoint.rotated", endpoint.id)
    return endpoint


def enable(session: Session, tenant_id: str, endpoint_id: str) -> WebhookEndpoint:
    """disabled -> enabled."""
    endpoint = get(session, tenant_id, endpoint_id)
    endpoint.status = "enabled"
    session.flush()
    return endpoint


def deliveries(
    session: Session, tenant_id: str, endpoint_id: str, after: str | None, limit: int
) -> Page[WebhookDelivery]:
    """What was sent to an endpoint or is still to be, newest first."""
    query = _to(get(session, tenant_id, endpoint_id))
    return page(session, query, WebhookDelivery, after, limit, ascending=False)


def replay(session: Session, tenant_id: str, endpoint_id: str, delivery_id: str) -> WebhookDelivery:
    """Send an event again, now and with all its attempts; it keeps its id."""
    endpoint = get(session, tenant_id, endpoint_id)
    delivery = session.scalar(_to(endpoint).where(WebhookDelivery.id == delivery_id).with_for_update())
    if delivery is None:
        message = f"No such webhook delivery: {delivery_id}"
        raise NotFound(message, code="webhook_delivery_not_found", param="delivery_id")
    if endpoint.status != "enabled":
        raise InvalidState(f"{endpoint.id} is {endpoint.status}; enable it first.")
    delivery.status, delivery.attempts, delivery.due_at = "pending", 0, 0.0
    session.flush()
    return delivery


def _of(tenant_id: str) -> Select[WebhookEndpoint]:
    return select(WebhookEndpoint).where(WebhookEndpoint.tenant_id == tenant_id)


def _to(endpoint: WebhookEndpoint) -> Select[WebhookDelivery]:
    return select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint.id)
