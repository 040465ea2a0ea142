"""Where customers are told that a job has ended, in OpenAI's events under Standard Webhooks' signature."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.deps import AfterQuery, BeginDep, CustomerDep, ReadDep, SessionDep, SettingsDep
from app.pages import Page
from app.webhooks import service
from app.webhooks.address import resolve
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from app.webhooks.schemas import (
    DeliveryList,
    DeliveryOut,
    EndpointCreate,
    EndpointDeleted,
    EndpointList,
    EndpointOut,
    EndpointSecret,
)

router = APIRouter(prefix="/v1/webhook_endpoints", tags=["webhooks"])


@router.post("", response_model=EndpointSecret)
def create_endpoint(
    ask: EndpointCreate, caller: CustomerDep, begin: BeginDep, settings: SettingsDep
) -> WebhookEndpoint:
    """Have events sent to an address; the secret that signs them is shown this once."""
    resolve(ask.url, allow_local=settings.webhooks_to_loopback)  # no transaction is open while names are looked up
    with begin() as session:
        return service.create(session, caller.tenant_id, ask)


@router.get("", response_model=EndpointList)
def list_endpoints(session: ReadDep, caller: CustomerDep) -> dict[str, object]:
    """Your endpoints, newest first."""
    return {"data": service.list_endpoints(session, caller.tenant_id)}


@router.get("/{endpoint_id}", response_model=EndpointOut)
def retrieve_endpoint(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> WebhookEndpoint:
    """One endpoint."""
    return service.get(session, caller.tenant_id, endpoint_id)


@router.delete("/{endpoint_id}", response_model=EndpointDeleted)
def delete_endpoint(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> EndpointDeleted:
    """Delete an endpoint; what was on its way to it is not sent."""
    return EndpointDeleted(id=service.remove(session, caller.tenant_id, endpoint_id).id)


@router.post("/{endpoint_id}/rotate", response_model=EndpointSecret)
def rotate_secret(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> WebhookEndpoint:
    """Take a new secret, shown this once; for 24 hours events are signed with the old one too."""
    return service.rotate(session, caller.tenant_id, endpoint_id)


@router.post("/{endpoint_id}/enable", response_model=EndpointOut)
def enable_endpoint(endpoint_id: str, session: SessionDep, caller: CustomerDep) -> WebhookEndpoint:
    """Send to an endpoint again that was disabled because its receiver answered 410."""
    return service.enable(session, caller.tenant_id, endpoint_id)


@router.get("/{endpoint_id}/deliveries", response_model=DeliveryList)
def list_deliveries(
    endpoint_id: str,
    session: SessionDep,
    caller: CustomerDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Page[WebhookDelivery]:
    """What was sent and what came of it, newest first."""
    return service.deliveries(session, caller.tenant_id, endpoint_id, after, limit)


@router.post("/{endpoint_id}/deliveries/{delivery_id}/replay", response_model=DeliveryOut)
def replay_delivery(endpoint_id: str, delivery_id: str, session: SessionDep, caller: CustomerDep) -> WebhookDelivery:
    """Send an event again; it keeps its id."""
    return service.replay(session, caller.tenant_id, endpoint_id, delivery_id)
