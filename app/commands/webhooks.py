"""`spard webhooks`: manage the addresses that receive events when jobs end."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.client import connect, get
from app.commands.terminal import Json, show_record, show_rows

webhooks = typer.Typer(no_args_is_help=True, help="Manage webhook endpoints.")

EndpointId = Annotated[str, typer.Argument(help="The endpoint's id, see `spard webhooks list`.")]
_COLUMNS = ("id", "url", "status", "events", "created_at")
_PATH = "webhook_endpoints"


@webhooks.command("list")
def list_webhooks(as_json: Json = False) -> None:
    """List your endpoints, newest first."""
    show_rows(get(_PATH)["data"], _COLUMNS, as_json)


@webhooks.command("create")
def create_webhook(
    url: Annotated[str, typer.Argument(help="An https address that accepts POST.")],
    event: Annotated[
        list[str] | None, typer.Option(help="An event type, may be repeated; default: OpenAI's three.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Create an endpoint that receives events; the secret that signs them is shown only once."""
    with connect() as client:
        made = client.post(_PATH, {"url": url} | ({"events": event} if event else {}))
    show_record(made, as_json)


@webhooks.command("show")
def show_webhook(endpoint_id: EndpointId, as_json: Json = False) -> None:
    """Show one endpoint."""
    show_record(get(f"{_PATH}/{endpoint_id}"), as_json)


@webhooks.command("rotate")
def rotate_secret(endpoint_id: EndpointId, as_json: Json = False) -> None:
    """Create a new secret, shown only once; for a day events are signed with the old one too."""
    _post(f"{endpoint_id}/rotate", as_json)


@webhooks.command("enable")
def enable_webhook(endpoint_id: EndpointId, as_json: Json = False) -> None:
    """Enable an endpoint that was disabled because its receiver answered 410."""
    _post(f"{endpoint_id}/enable", as_json)


@webhooks.command("deliveries")
def list_deliveries(
    endpoint_id: EndpointId,
    limit: Annotated[int, typer.Option(min=1, help="List only the newest N deliveries.")] = 20,
    as_json: Json = False,
) -> None:
    """List the deliveries to an endpoint with their results, newest first."""
    with connect() as client:
        found = list(client.pages(f"{_PATH}/{endpoint_id}/deliveries", limit))
    show_rows(found, ("id", "type", "job_id", "status", "attempts", "outcome", "created_at"), as_json)


@webhooks.command("replay")
def replay_delivery(
    endpoint_id: EndpointId,
    delivery_id: Annotated[str, typer.Argument(help="The delivery's id, see `spard webhooks deliveries ENDPOINT_ID`.")],
    as_json: Json = False,
) -> None:
    """Send an event again, with the same id."""
    _post(f"{endpoint_id}/deliveries/{delivery_id}/replay", as_json)


@webhooks.command("delete")
def delete_webhook(endpoint_id: EndpointId, as_json: Json = False) -> None:
    """Delete an endpoint; its waiting events are not sent."""
    with connect() as client:
        gone = client.delete(f"{_PATH}/{endpoint_id}")
    show_record(gone, as_json)


def _post(path: str, as_json: bool) -> None:
    with connect() as client:
        changed = client.post(f"{_PATH}/{path}")
    show_record(changed, as_json)
