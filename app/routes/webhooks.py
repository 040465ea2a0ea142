"""Webhooks for ended jobs, in the form of OpenAI's events with signatures by Standard Webhooks."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from app.db.tables import WebhookDelivery, WebhookEndpoint
from app.deps import (
    AdminDep,
    AfterQuery,
    BeginDep,
    CustomerDep,
    ProviderSessionDep,
    ReadDep,
    SessionDep,
    SettingsDep,
)
from app.http.pagination import Page
from app.webhooks import service
from app.webhooks.address import resolve
from app.webhooks.service import (
    DeliveryList,
    DeliveryOut,
    DeliveryOverview,
    DeliveryOverviewList,
    EndpointCreate,
    EndpointDeleted,
    EndpointList,
    EndpointOut,
    EndpointOverviewList,
    EndpointSecret,
    EventBody,
)

router = APIRouter(prefix="/v1/webhook_endpoints", tags=["webhooks"])
admin = APIRouter(prefix="/v1/admin", tags=["provider"])
sent = APIRouter(tags=["webhooks"])  # what we send; only for the OpenAPI document


@router.post("", response_model=EndpointSecret)
def create_endpoint(
    ask: EndpointCreate, caller: CustomerDep, begin: BeginDep, settings: SettingsDep
) -> WebhookEndpoint:
    """Send events to an address; the secret that signs them is shown only once."""
    resolve(ask.url, allow_local=settings.webhooks_to_loopback)  # DNS look-up, so outside of any transaction
    with begin() as session:
        return service.create(session, caller.project_id, ask)


@router.get("", response_model=EndpointList)
def list_endpoints(session: ReadDep, caller: CustomerDep) -> dict[str, object]:
    """List your endpoints, newest first."""
    return {"data": service.list_endpoints(session, caller.project_id)}


@router.get("/{endpoint_id}", response_model=EndpointOut)
def retrieve_endpoint(endpoint_id: str, session: ReadDep, caller: CustomerDep) -> WebhookEndpoint:
    """Return one endpoint."""
    return service.get(session, caller.project_id, endpoint_id)


@router.delete("/{endpoint_id}", response_model=EndpointDeleted)
def delete_endpoint(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> EndpointDeleted:
    """Delete an endpoint; its pending events are not sent."""
    return EndpointDeleted(id=service.remove(session, caller.project_id, endpoint_id).id)


@router.post("/{endpoint_id}/rotate", response_model=EndpointSecret)
def rotate_secret(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> WebhookEndpoint:
    """Create a new secret, shown only once; for 24 hours events are signed with the old one too."""
    return service.rotate(session, caller.project_id, endpoint_id)


@router.post("/{endpoint_id}/enable", response_model=EndpointOut)
def enable_endpoint(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> WebhookEndpoint:
    """Enable an endpoint that was disabled because its receiver answered 410."""
    return service.enable(session, caller.project_id, endpoint_id)


@router.get("/{endpoint_id}/deliveries", response_model=DeliveryList)
def list_deliveries(
    endpoint_id: str,
    session: ReadDep,
    caller: CustomerDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Page[WebhookDelivery]:
    """List the deliveries to an endpoint with their results, newest first."""
    return service.deliveries(session, caller.project_id, endpoint_id, after, limit)


@router.post("/{endpoint_id}/deliveries/{delivery_id}/replay", response_model=DeliveryOut)
def replay_delivery(endpoint_id: str, delivery_id: str, session: SessionDep, caller: CustomerDep) -> WebhookDelivery:
    """Send an event again; it keeps its id."""
    return service.replay(session, caller.project_id, endpoint_id, delivery_id)


@admin.get("/webhook_endpoints", response_model=EndpointOverviewList)
def list_all_endpoints(session: ReadDep, caller: AdminDep) -> EndpointOverviewList:
    """List the endpoints of all projects, with the numbers of pending, delivered and failed deliveries."""
    return EndpointOverviewList(data=service.all_endpoints(session))


@admin.get("/webhook_deliveries", response_model=DeliveryOverviewList)
def list_all_deliveries(
    session: ReadDep,
    caller: AdminDep,
    status: Literal["pending", "delivered", "failed"] | None = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Page[WebhookDelivery]:
    """List the deliveries of all projects, newest first."""
    return service.all_deliveries(session, status, after, limit)


@admin.post("/webhook_deliveries/{delivery_id}/replay", response_model=DeliveryOverview)
def replay_any_delivery(delivery_id: str, session: ProviderSessionDep, caller: AdminDep) -> WebhookDelivery:
    """Send an event of any project again; it keeps its id."""
    return service.replay_any(session, delivery_id)


@sent.post("fine_tuning.job.succeeded")
def job_succeeded(event: EventBody) -> None:
    """Report that a job has succeeded."""


@sent.post("fine_tuning.job.failed")
def job_failed(event: EventBody) -> None:
    """Report that a job has failed, or that its adapter did not pass the audit."""


@sent.post("fine_tuning.job.cancelled")
def job_cancelled(event: EventBody) -> None:
    """Report that a job was cancelled and its worker has stopped."""
