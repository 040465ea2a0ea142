"""spard files: training files as OpenAI's API knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.terminal import Json, connect, get, say, show_record, show_rows

files = typer.Typer(no_args_is_help=True, help="Training files.")

_PROBLEM = ("line", "severity", "code", "pointer", "message", "hint")


def send(path: Path) -> dict[str, Any]:
    """Upload a training file."""
    with path.open("rb") as content, connect() as client:
        return client.files.create(file=(path.name, content), purpose="fine-tune").to_dict()


@files.command("upload")
def upload_file(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of training rows.")],
    as_json: Json = False,
) -> None:
    """Upload a training file and show what is wrong with it, if anything."""
    sent = send(file)
    show_record(sent, as_json)
    if sent["status"] == "error":
        if not as_json:
            show_rows(_problems(sent["id"])[:20], _PROBLEM, as_json)
        raise typer.Exit(1)


@files.command("list")
def list_files(as_json: Json = False) -> None:
    """Your files, newest first."""
    with connect() as client:
        found = [file.to_dict() for file in client.files.list()]
    show_rows(found, ("id", "filename", "purpose", "bytes", "status", "created_at"), as_json)


@files.command("show")
def show_file(file_id: str, as_json: Json = False) -> None:
    """One file, and every problem of it."""
    with connect() as client:
        file = client.files.retrieve(file_id).to_dict()
    problems = _problems(file_id)
    show_record(file | ({"problems": problems} if as_json else {}), as_json)
    if problems and not as_json:
        show_rows(problems, _PROBLEM, as_json)


@files.command("delete")
def delete_file(file_id: str) -> None:
    """Delete a file that no unfinished job uses."""
    with connect() as client:
        client.files.delete(file_id)
    say(f"deleted {file_id}")


def _problems(file_id: str) -> list[dict[str, Any]]:
    problems: list[dict[str, Any]] = get(f"/files/{file_id}/validation")["problems"]
    return problems
