"""Manage endpoints and deliveries; every query is limited to one project, except the provider's at the end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy import Select, case, delete, func, select
from sqlalchemy.orm import Session

from app import audit_log, db
from app.db.tables import Project, WebhookDelivery, WebhookEndpoint
from app.errors import InvalidState, NotFound
from app.http.pagination import Page, page
from app.http.schemas import Body, UnixTime
from app.webhooks.delivery import new_secret

EventType = Literal[
    "fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled", "safety.audit.completed"
]
_OPENAI_S: tuple[EventType, ...] = ("fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled")
_MAX_ENDPOINTS = 10
_BOTH_VALID = timedelta(hours=24)


def _once(events: list[EventType]) -> list[EventType]:
    return list(dict.fromkeys(events))


class EndpointCreate(Body):
    """The address to send events to, and their types.

    The default is OpenAI's three types, because its client misreads ours.
    """

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    events: Annotated[list[EventType], Field(min_length=1, max_length=10), AfterValidator(_once)] = Field(
        default_factory=lambda: list(_OPENAI_S)
    )


class EndpointOut(BaseModel):
    """An endpoint; `disabled` after its receiver answered 410."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: UnixTime
    url: str
    events: list[EventType]
    status: Literal["enabled", "disabled"]


class EndpointSecret(EndpointOut):
    """An endpoint with its secret, which is shown only once."""

    secret: str


class EndpointList(BaseModel):
    """All webhook endpoints of your project, newest first, without their secrets."""

    object: Literal["list"] = "list"
    data: list[EndpointOut]
    has_more: Literal[False] = False


class EndpointDeleted(BaseModel):
    """Confirms that an endpoint was deleted."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    deleted: Literal[True] = True


class EventSubject(BaseModel):
    """The job that an event is about, by `id`."""

    id: str


class EventBody(BaseModel):
    """The body sent to an endpoint, in OpenAI's form; `data.id` is the job's id."""

    id: str
    object: Literal["event"] = "event"
    type: EventType
    created_at: int
    data: EventSubject


class DeliveryOut(BaseModel):
    """One event to one endpoint: its status and the receiver's last answer."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    created_at: UnixTime
    event_id: str
    type: EventType
    job_id: str
    status: Literal["pending", "delivered", "failed"]
    attempts: int
    outcome: str | None
    delivered_at: UnixTime | None


class DeliveryList(BaseModel):
    """One page of deliveries, newest first."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[DeliveryOut]
    has_more: bool


class EndpointOverview(EndpointOut):
    """An endpoint of any project with the numbers of its pending, delivered and failed deliveries."""

    project_id: str
    pending: int
    delivered: int
    failed: int


class EndpointOverviewList(BaseModel):
    """The webhook endpoints of all projects, newest first, without their secrets."""

    object: Literal["list"] = "list"
    data: list[EndpointOverview]


class DeliveryOverview(DeliveryOut):
    """A delivery to an endpoint of any project."""

    endpoint_id: str


class DeliveryOverviewList(BaseModel):
    """One page of the deliveries of all projects, newest first."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[DeliveryOverview]
    has_more: bool


def create(session: Session, project_id: str, ask: EndpointCreate) -> WebhookEndpoint:
    """Create an endpoint for a checked address; raise `InvalidState` if the project has too many."""
    # Locked, so that two requests at the same time are counted one after the other.
    session.execute(select(Project.id).where(Project.id == project_id).with_for_update())
    if (
        session.scalar(select(func.count()).select_from(_select_endpoints(project_id).subquery())) or 0
    ) >= _MAX_ENDPOINTS:
        raise InvalidState(f"There are {_MAX_ENDPOINTS} endpoints already; delete one.", code="too_many_endpoints")
    endpoint = WebhookEndpoint(project_id=project_id, url=ask.url, events=list(ask.events), secret=new_secret())
    session.add(endpoint)
    session.flush()
    audit_log.record(session, "webhook_endpoint.created", endpoint.id, host=urlsplit(endpoint.url).hostname)
    return endpoint


def list_endpoints(session: Session, project_id: str) -> Sequence[WebhookEndpoint]:
    """Return the project's endpoints, newest first."""
    return session.scalars(
        _select_endpoints(project_id).order_by(WebhookEndpoint.created_at.desc(), WebhookEndpoint.id)
    ).all()


def get(session: Session, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Return the project's endpoint; raise `NotFound` for another project's."""
    return _require(session.scalar(_select_endpoint(project_id, endpoint_id)), endpoint_id)


def _lock(session: Session, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Return the project's endpoint, locked until the transaction ends; raise `NotFound` for another project's."""
    return _require(session.scalar(_select_endpoint(project_id, endpoint_id).with_for_update()), endpoint_id)


def _require(endpoint: WebhookEndpoint | None, endpoint_id: str) -> WebhookEndpoint:
    if endpoint is None:
        message = f"No such webhook endpoint: {endpoint_id}"
        raise NotFound(message, code="webhook_endpoint_not_found", param="endpoint_id")
    return endpoint


def remove(session: Session, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Delete an endpoint and its deliveries."""
    endpoint = _lock(session, project_id, endpoint_id)
    session.execute(delete(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint.id))
    session.delete(endpoint)
    audit_log.record(session, "webhook_endpoint.deleted", endpoint.id)
    return endpoint


def rotate(session: Session, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Give an endpoint a new secret; for a day the old one signs too, so that receivers can switch."""
    endpoint = _lock(session, project_id, endpoint_id)
    endpoint.old_secret, endpoint.old_secret_until = endpoint.secret, db.clock(session) + _BOTH_VALID
    endpoint.secret = new_secret()
    session.flush()
    audit_log.record(session, "webhook_endpoint.rotated", endpoint.id)
    return endpoint


def enable(session: Session, project_id: str, endpoint_id: str) -> WebhookEndpoint:
    """Enable a disabled endpoint."""
    endpoint = _lock(session, project_id, endpoint_id)
    endpoint.status = "enabled"
    session.flush()
    return endpoint


def deliveries(
    session: Session, project_id: str, endpoint_id: str, after: str | None, limit: int
) -> Page[WebhookDelivery]:
    """Return a page of an endpoint's deliveries, newest first; `after` is the last id of the previous page."""
    query = _select_deliveries(get(session, project_id, endpoint_id))
    return page(session, query, WebhookDelivery, after, limit, ascending=False)


def replay(session: Session, project_id: str, endpoint_id: str, delivery_id: str) -> WebhookDelivery:
    """Send an event again, with a fresh set of attempts and the same id."""
    endpoint = _lock(session, project_id, endpoint_id)
    delivery = session.scalar(_select_deliveries(endpoint).where(WebhookDelivery.id == delivery_id).with_for_update())
    if delivery is None:
        message = f"No such webhook delivery: {delivery_id}"
        raise NotFound(message, code="webhook_delivery_not_found", param="delivery_id")
    if endpoint.status != "enabled":
        raise InvalidState(f"{endpoint.id} is {endpoint.status}; enable it first.")
    delivery.status, delivery.attempts, delivery.due_at = "pending", 0, 0.0
    session.flush()
    return delivery


def _select_endpoints(project_id: str) -> Select[WebhookEndpoint]:
    return select(WebhookEndpoint).where(WebhookEndpoint.project_id == project_id)


def _select_endpoint(project_id: str, endpoint_id: str) -> Select[WebhookEndpoint]:
    return _select_endpoints(project_id).where(WebhookEndpoint.id == endpoint_id)


def _select_deliveries(endpoint: WebhookEndpoint) -> Select[WebhookDelivery]:
    return select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint.id)


# List and replay webhooks of all projects, for the provider.

_STATES = ("pending", "delivered", "failed")


def all_endpoints(session: Session) -> list[EndpointOverview]:
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


def all_deliveries(session: Session, status: str | None, after: str | None, limit: int) -> Page[WebhookDelivery]:
    """Return a page of the deliveries to all endpoints, newest first, of one status or any."""
    query = select(WebhookDelivery)
    if status is not None:
        query = query.where(WebhookDelivery.status == status)
    of_any_status = select(WebhookDelivery.created_at).where(WebhookDelivery.id == after)
    return page(session, query, WebhookDelivery, after, limit, ascending=False, left=(of_any_status,))


def replay_any(session: Session, delivery_id: str) -> WebhookDelivery:
    """Send an event of any project again; it keeps its id."""
    query = select(WebhookDelivery.endpoint_id, WebhookEndpoint.project_id).where(WebhookDelivery.id == delivery_id)
    found = session.execute(query.join(WebhookEndpoint, WebhookEndpoint.id == WebhookDelivery.endpoint_id)).first()
    if found is None:
        message = f"No such webhook delivery: {delivery_id}"
        raise NotFound(message, code="webhook_delivery_not_found", param="delivery_id")
    endpoint_id, project_id = found
    delivery = replay(session, project_id, endpoint_id, delivery_id)
    audit_log.record(session, "webhook_delivery.replayed", delivery.id, project=project_id)
    return delivery
