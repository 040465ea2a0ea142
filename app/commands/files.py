"""`spard files`: upload, check, preview, convert and download training files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from app.commands.client import connect, download
from app.commands.terminal import Json, say, show_json, show_record, show_rows
from spard.commands.exits import ERROR

files = typer.Typer(no_args_is_help=True, help="Upload, check, preview, convert and download training files.")

_PROBLEM = ("line", "severity", "code", "pointer", "message", "hint")
_FINDING = ("severity", "code", "text", "hint")
FileId = Annotated[str, typer.Argument(help="The file's id, see `spard files list`.")]


@files.command("upload")
def upload_file(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Training rows: JSONL, Parquet or Arrow.")],
    as_json: Json = False,
) -> None:
    """Upload a training file and show the problems found in it; exits with 1 if it is invalid."""
    with connect() as client:
        sent = client.send("files", file, {"purpose": "fine-tune"})
        show_record(sent, as_json)
        if not as_json:
            _show_findings(client.get(f"files/{sent['id']}/validation"))
        if sent["status"] == "error":
            raise typer.Exit(ERROR)


@files.command("list")
def list_files(as_json: Json = False) -> None:
    """List your files, newest first."""
    with connect() as client:
        found = client.get("files")["data"]
    show_rows(found, ("id", "filename", "purpose", "bytes", "status", "created_at"), as_json)


@files.command("show")
def show_file(
    file_id: FileId,
    lines: Annotated[bool, typer.Option("--lines", help="Also show every problem by line.")] = False,
    as_json: Json = False,
) -> None:
    """Show one file and the problems found in it, each once with the number of affected rows."""
    with connect() as client:
        file = client.get(f"files/{file_id}")
        found = client.get(f"files/{file_id}/validation")
    more = {"findings": found["findings"], "problems": found["problems"]}
    show_record(file | (more if as_json else {}), as_json)
    if not as_json:
        _show_findings(found)
        if lines and found["problems"]:
            show_rows(found["problems"], _PROBLEM, as_json)


@files.command("preview")
def preview_file(
    file_id: FileId,
    model: Annotated[str, typer.Option(help="The base model whose template and tokenizer are used.")],
    rows: Annotated[
        int, typer.Option("-n", "--rows", min=1, max=20, help="Number of rows to show, from the first.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Show rows as the model will be trained on them; tokens in the loss are bold, or in a pipe between [[ and ]]."""
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the first converted rows; create no file.")
    ] = False,
    leave_out: Annotated[
        list[str] | None, typer.Option("--leave-out", help="A column to leave out; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a file from ShareGPT, Alpaca or TRL format to OpenAI's, as a new file."""
    with connect() as client:
        made = client.post(f"files/{file_id}/convert", dry_run=dry_run, leave_out=leave_out)
    if as_json or made["file"] is None:
        return show_json(made if as_json else made["data"])
    return show_record(made["file"] | {"converted_from": made["format"], "left_out": made["left_out"]}, as_json)


@files.command("download")
def download_file(
    file_id: FileId,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: the file's own name in the current folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a file, such as a job's metrics; an interrupted download is resumed."""
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


def _show_findings(found: Any) -> None:
    """Print the problems of a file, each once, if there are any; below each the piece of the row that has the fault."""
    if rows := found["findings"]:
        texts = ("\n".join(filter(None, (each["text"], each.get("excerpt")))) for each in rows)
        show_rows([row | {"text": text} for row, text in zip(rows, texts, strict=True)], _FINDING, as_json=False)


def _show_row(row: Any) -> None:
    """Print a previewed row with all its samples, and below it the non-preferred answer of a preference pair."""
    if row["error"]:
        return say(f"line {row['line']}: {row['error']}")
    earlier, other = row.get("earlier_samples") or [], row.get("non_preferred")
    why = f", in {len(earlier) + 1} samples: the model's template rewrites earlier turns" if earlier else ""
    say(f"line {row['line']}: {_counts(row)}{why}")
    for sample in (*earlier, row):
        _show_tokens(sample["tokens"])
    if other:
        say(f"line {row['line']}, the answer that is not preferred: {_counts(other)}")
        _show_tokens(other["tokens"])
    return None


def _counts(shown: Any) -> str:
    return f"{shown['n_tokens']} tokens, {shown['n_trained']} of them trained"


def _show_tokens(tokens: list[Any]) -> None:
    console, text, was_trained = Console(highlight=False, soft_wrap=True, emoji=False), Text(), False
    for token in [*tokens, {"text": "", "trained": False}]:
        if token["trained"] != was_trained and not console.is_terminal:
            text.append("[[" if token["trained"] else "]]")
        text.append(token["text"], style="bold green" if token["trained"] else "dim")
        was_trained = token["trained"]
    console.print(text)
