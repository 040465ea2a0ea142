"""spard keys create: keys to the service, given out by the provider."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.commands.terminal import Json, connect, show_json, show_record


def create_key(
    project: Annotated[str, typer.Argument(help="The project's id.")],
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    owner: Annotated[str | None, typer.Option(help="The person who will hold it: a name or a mail address.")] = None,
    admin: Annotated[bool, typer.Option(help="With the admin scope.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="It sees its project and changes nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Make a key; its secret is shown this once."""
    if admin and read_only:
        raise typer.BadParameter("An admin's key is not read-only; give one of --admin and --read-only.")
    scopes = ["read"] if read_only else ["admin", "customer"] if admin else ["customer"]
    ask = {"project_id": project, "name": name, "owner": owner, "scopes": scopes}
    with connect() as client:
        made: Any = client.post("/admin/keys", body=ask, cast_to=object)
    if as_json:
        return show_json(made)
    return show_record(made["key"] | {"secret": made["secret"]}, as_json)
