"""spard files: training files as OpenAI's API knows them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from app.commands.client import Client, connect
from app.commands.downloads import download
from app.commands.terminal import Json, say, show_json, show_record, show_rows
from spard.commands.exits import ERROR

files = typer.Typer(no_args_is_help=True, help="Training files: upload, check, look at, convert, download.")

_PROBLEM = ("line", "severity", "code", "pointer", "message", "hint")
FileId = Annotated[str, typer.Argument(help="See `spard files list`.")]


@files.command("upload")
def upload_file(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file of training rows.")],
    as_json: Json = False,
) -> None:
    """Upload a training file and show what is wrong with it, if anything."""
    with connect() as client:
        sent = client.send("files", file, {"purpose": "fine-tune"})
        show_record(sent, as_json)
        if sent["status"] == "error":
            if not as_json:
                show_rows(_problems(client, sent["id"])[:20], _PROBLEM, as_json)
            raise typer.Exit(ERROR)


@files.command("list")
def list_files(as_json: Json = False) -> None:
    """List your files, newest first."""
    with connect() as client:
        found = client.get("files")["data"]
    show_rows(found, ("id", "filename", "purpose", "bytes", "status", "created_at"), as_json)


@files.command("show")
def show_file(file_id: FileId, as_json: Json = False) -> None:
    """Show one file and every problem in it."""
    with connect() as client:
        file = client.get(f"files/{file_id}")
        problems = _problems(client, file_id)
    show_record(file | ({"problems": problems} if as_json else {}), as_json)
    if problems and not as_json:
        show_rows(problems, _PROBLEM, as_json)


@files.command("preview")
def preview_file(
    file_id: FileId,
    model: Annotated[str, typer.Option(help="The base model whose template and tokenizer are used.")],
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, max=20, help="How many rows, from the first.")] = 3,
    as_json: Json = False,
) -> None:
    """Show rows as they will be trained on; what counts in the loss is bold, or in a pipe between [[ and ]]."""
    with connect() as client:
        found = client.get(f"files/{file_id}/preview", model=model, n=rows)
    if as_json:
        return show_json(found)
    for row in found["data"]:
        _show_row(row)
    return None


@files.command("convert")
def convert_file(
    file_id: FileId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the first rows.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a file in ShareGPT's or Alpaca's form into a chat file, under a new id."""
    with connect() as client:
        made = client.post(f"files/{file_id}/convert", dry_run=dry_run)
    if as_json or made["file"] is None:
        return show_json(made if as_json else made["data"])
    return show_record(made["file"] | {"converted_from": made["format"]}, as_json)


@files.command("download")
def download_file(
    file_id: FileId,
    out: Annotated[Path | None, typer.Option(help="Default: the file's own name, here.")] = None,
    as_json: Json = False,
) -> None:
    """Download a file, such as a job's metrics; an interrupted download continues where it was."""
    with connect() as client:
        path = out or Path(Path(client.get(f"files/{file_id}")["filename"]).name)
        saved = download(client, f"files/{file_id}/content", path)
    if as_json:
        return show_json({"path": str(saved.path), "bytes": saved.bytes, "sha256": saved.sha256})
    return say(f"wrote {saved.path}")


@files.command("delete")
def delete_file(file_id: FileId, as_json: Json = False) -> None:
    """Delete a file that no unfinished job uses."""
    with connect() as client:
        gone = client.delete(f"files/{file_id}")
    if as_json:
        return show_json(gone)
    return say(f"deleted {file_id}")


def _problems(client: Client, file_id: str) -> list[Any]:
    problems: list[Any] = client.get(f"files/{file_id}/validation")["problems"]
    return problems


def _show_row(row: Any) -> None:
    """Print a row, and the other answer of a preference pair below it."""
    if row["error"]:
        return say(f"line {row['line']}: {row['error']}")
    for title, shown in (("", row), (", the answer that is not preferred", row.get("non_preferred"))):
        if shown:
            counts = f"{shown['n_tokens']} tokens, {shown['n_trained']} of them trained"
            say(f"line {row['line']}{title}: {counts}")
            _show_tokens(shown["tokens"])
    return None


def _show_tokens(tokens: list[Any]) -> None:
    console, text, was_trained = Console(highlight=False, soft_wrap=True, emoji=False), Text(), False
    for token in [*tokens, {"text": "", "trained": False}]:
        if token["trained"] != was_trained and not console.is_terminal:
            text.append("[[" if token["trained"] else "]]")
        text.append(token["text"], style="bold green" if token["trained"] else "dim")
        was_trained = token["trained"]
    console.print(text)
