"""spard models, spard pool, spard suites: what the provider offers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.terminal import Json, connect, get, show_record, show_rows

models = typer.Typer(no_args_is_help=True, help="Base models and fine-tuned ones.")
pool = typer.Typer(no_args_is_help=True, help="Safety pools that defenses train on.")
suites = typer.Typer(no_args_is_help=True, help="Prompts that every adapter is measured with.")

Jsonl = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file.")]
Name = Annotated[str, typer.Option(help="Importing the same name again makes a new version.")]
Version = Annotated[str, typer.Argument(help="A version's id: corpus-...")]
_VERSION = ("name", "kind", "version", "rows", "created_at", "id")


class Kind(StrEnum):
    """What a right answer is: a refusal, any help, or the row's `answer`."""

    harmful = "harmful"
    benign = "benign"
    utility = "utility"


@models.command("add")
def add_model(
    alias: Annotated[str, typer.Argument(help="What customers call it.")],
    source: Annotated[str, typer.Argument(help="A folder with config.json and *.safetensors, or a hub id.")],
    revision: Annotated[str | None, typer.Option(help="The commit, for a hub id.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: by the model's width.")] = None,
    allow_full_fine_tuning: Annotated[bool, typer.Option(help="Also without LoRA.")] = False,
    as_json: Json = False,
) -> None:
    """Offer a base model; the same alias again replaces it."""
    folder = Path(source).expanduser()
    entry = {
        "alias": alias,
        "source": str(folder.resolve()) if folder.is_dir() else source,
        "revision": revision,
        "learning_rate": learning_rate,
        "allow_full_fine_tuning": allow_full_fine_tuning,
    }
    with connect() as client:
        added: Any = client.post("/admin/models", body=entry, cast_to=object)
    show_record(added, as_json)


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """List the models that jobs can name."""
    show_rows(get("/models")["data"], ("id", "owned_by", "created"), as_json)


@pool.command("import")
def import_pool(file: Jsonl, name: Name, as_json: Json = False) -> None:
    """Import rows {"prompt", "safe"} or {"prompt", "benign": true}; a fifth, at most 300, is held out as attacks."""
    show_record(_send("/admin/pools", file, {"name": name}), as_json)


@pool.command("list")
def list_pools(as_json: Json = False) -> None:
    """Every version of every pool."""
    columns = ("name", "version", "rows", "held_out", "created_at", "id")
    show_rows(get("/admin/pools")["data"], columns, as_json)


@pool.command("delete")
def delete_pool(corpus_id: Version, as_json: Json = False) -> None:
    """Delete a version with what was held out of it; refused while a job that has not ended names it."""
    _delete(f"/admin/pools/{corpus_id}", as_json)


@suites.command("import")
def import_suite(file: Jsonl, name: Name, kind: Annotated[Kind, typer.Option()], as_json: Json = False) -> None:
    """Import rows {"prompt", "answer"?, "category"?}."""
    show_record(_send("/admin/suites", file, {"name": name, "kind": str(kind)}), as_json)


@suites.command("list")
def list_suites(as_json: Json = False) -> None:
    """Every version of every suite."""
    show_rows(get("/admin/suites")["data"], _VERSION, as_json)


@suites.command("delete")
def delete_suite(corpus_id: Version, as_json: Json = False) -> None:
    """Delete a version; refused while a job that has not ended names it."""
    _delete(f"/admin/suites/{corpus_id}", as_json)


def _delete(path: str, as_json: bool) -> None:
    with connect() as client:
        deleted: Any = client.delete(path, cast_to=object)
    show_record(deleted, as_json)


def _send(path: str, file: Path, params: dict[str, Any]) -> Any:
    with file.open("rb") as content, connect() as client:
        files = {"file": (file.name, content)}
        headers = {"content-type": "multipart/form-data"}
        options: Any = {"params": params, "headers": headers}
        return client.post(path, files=files, options=options, cast_to=object)
