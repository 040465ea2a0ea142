"""`spard policies`: list, show and set the versions of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.client import connect, get
from app.commands.terminal import CommandFailed, Json, readable, say, show_json, show_record, show_rows

policies = typer.Typer(
    no_args_is_help=True, help="Manage policies: what customers may request and what the gate requires."
)


@policies.command("list")
def list_policies(as_json: Json = False) -> None:
    """List all versions of the policy, newest first; the first one is in force."""
    found = get("admin/policies")["data"]
    columns = ("version", "created_at", "created_by", "content.defenses", "content.models", "content.waivers")
    show_rows(found, columns, as_json)


@policies.command("show")
def show_policy(
    version: Annotated[int | None, typer.Argument(help="Version number; default: the version in force.")] = None,
    as_json: Json = False,
) -> None:
    """Show a version of the policy; with --json in the form that `spard policies set` reads."""
    found = get("admin/policies")["data"]
    chosen = next((each for each in found if version in (None, each["version"])), None)
    if chosen is None:
        raise CommandFailed(f"There is no version {version}; there are {', '.join(str(e['version']) for e in found)}.")
    if as_json:
        return show_json(chosen)
    content = chosen.pop("content")
    return show_record(chosen | content, as_json)


@policies.command("set")
def set_policy(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="JSON with the changed fields, or a whole policy.")
    ],
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Reset fields that the file does not name to their defaults, instead of keeping them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Put a new version of the policy in force; existing jobs keep the version that they were created under.

    Fields that the file does not name stay, `null` sets a field's default, and a list replaces a list. The output of
    `show --json` counts as a whole policy: fields deleted from it get their defaults.
    """
    content, is_whole = _content(file)
    with connect() as client:
        made = client.post("admin/policies", content, replace=replace or is_whole)
    if as_json:
        return show_json(made)
    say(f"Version {made['version']} is in force.")
    for change in made["changes"]:
        say(f"  {change['field']}: {readable(change['now'])}, was {readable(change['was'])}")
    if not made["changes"]:
        say("  Nothing differs from the version before it.")
    return None


def _content(file: Path) -> tuple[Any, bool]:
    """Return a file's policy content, and True if it is a whole policy as `show --json` prints it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandFailed(f"{file} is no JSON: {error}") from None
    is_shown = isinstance(found, dict) and found.get("object") == "policy"
    return (found["content"] if is_shown else found), is_shown
