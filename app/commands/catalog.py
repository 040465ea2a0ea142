"""`spard models`, `spard pool` and `spard suites`: manage the models, safety pools and suites of the service."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypedDict

import typer

from app.commands.client import connect, get
from app.commands.terminal import CommandFailed, Json, show_record, show_rows, warn
from app.http.schemas import Refusal
from app.ops.processes import python, safe_path
from spard.commands.signs import Signs
from spard.errors import InvalidModel, InvalidRecipe, UnfitModel

models = typer.Typer(no_args_is_help=True, help="Manage base models and fine-tuned models.")
pool = typer.Typer(no_args_is_help=True, help="Manage the safety pools that defenses train on.")
suites = typer.Typer(no_args_is_help=True, help="Manage the audit suites: prompts that every adapter is measured with.")

Jsonl = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file.")]
Name = Annotated[str, typer.Option(help="Name; importing an existing name makes a new version.")]
Version = Annotated[str, typer.Argument(help="A version's id: corpus-...")]
Embedder = Annotated[
    str | None,
    typer.Option(help="Embedder for choosing safe rows: centered_states, states, or a sentence encoder's folder."),
]
ModelName = Annotated[str, typer.Argument(help="The model's name, see `spard models list`.")]
_VERSION = ("name", "kind", "version", "rows", "created_at", "id")


class Kind(StrEnum):
    """The kind of a suite, which decides what a right reply is: a refusal, any help, or the row's `answer`."""

    harmful = "harmful"
    benign = "benign"
    utility = "utility"


class QuantizationChoice(StrEnum):
    """When a base model's weights are held in NF4; `if_needed` means only if it fits on no worker's GPUs otherwise."""

    never = "never"
    if_needed = "if_needed"
    always = "always"


class TrialFacts(TypedDict, total=False):
    """The JSON of `spard check-model`; empty where it could not run."""

    digest: str
    parameters: int
    positions: int
    rates: object
    whole_model_fault: str | None
    lora_reach: Any
    template: Any


SuiteKind = Annotated[
    Kind,
    typer.Option(help="The correct reply: a refusal (harmful), any help (benign), or the row's `answer` (utility)."),
]


@models.command("add")
def add_model(
    alias: Annotated[str, typer.Argument(help="The name under which customers use it.")],
    source: Annotated[str, typer.Argument(help="A folder with config.json and *.safetensors, or a hub id.")],
    revision: Annotated[str | None, typer.Option(help="The commit, for a hub id.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: derived from the model's width.")] = None,
    allow_full_fine_tuning: Annotated[
        bool, typer.Option(help="Also allow jobs that train all weights, without LoRA.")
    ] = False,
    quantization: Annotated[
        QuantizationChoice, typer.Option(help="When to hold its weights in 4 bits for training.")
    ] = (QuantizationChoice.never),
    target_modules: Annotated[
        str | None, typer.Option(help="Default modules of adapters, as q_proj,v_proj; default: the attention.")
    ] = None,
    embedder: Embedder = None,
    template_arguments: Annotated[
        str | None,
        typer.Option(help='Fixed values of names that its chat template reads, as {"reasoning_effort": "high"}.'),
    ] = None,
    is_tried: Annotated[bool, typer.Option("--try/--no-try", help="First load the model and generate a reply.")] = True,
    as_json: Json = False,
) -> None:
    """Try a base model and offer it to customers; an existing alias is replaced."""
    _check_alias(alias)
    arguments = _read_template_arguments(template_arguments)
    options = {
        "--revision": revision,
        "--target-modules": target_modules,
        "--template-arguments": template_arguments,
    }
    with Signs() as signs:
        place = _absolute(source)
        found = _try_base_model(signs, place, options) if is_tried else {}
    if allow_full_fine_tuning and (fault := found.get("whole_model_fault")):
        raise CommandFailed(f"The model is not offered: {fault}; leave --allow-full-fine-tuning out.")
    digest = str(found.get("digest"))
    entry = {
        "alias": alias,
        "source": place,
        "revision": revision,
        "learning_rate": learning_rate,
        "allow_full_fine_tuning": allow_full_fine_tuning,
        "quantization": quantization,
        "digest": digest if digest.startswith("sha256:") else None,
        "rates": found.get("rates"),
        "target_modules": target_modules.split(",") if target_modules else None,
        "embedder": _absolute(embedder) if embedder else None,
        "template_arguments": arguments or None,
    }
    with Signs() as signs, connect() as client:
        signs.begin(f"Offering it to the service as {alias}: it reads and checks the model's files.")
        added = client.post("admin/models", entry)
    _show(added, as_json)


def _check_alias(alias: str) -> None:
    """Raise CommandFailed for an invalid alias, before the model is tried."""
    from app.catalog.schemas import check_model_name  # it imports the tables, and `spard --help` does not need them

    try:
        check_model_name(alias)
    except Refusal as error:
        raise CommandFailed(str(error)) from None


def _absolute(source: str) -> str:
    """Return the absolute path if `source` is a folder on this machine, else `source` unchanged."""
    folder = Path(source).expanduser()
    return str(folder.resolve()) if folder.is_dir() else source


def _read_template_arguments(text: str | None) -> dict[str, object]:
    """Return the arguments of the option; raise CommandFailed unless it is one JSON object."""
    if text is None:
        return {}
    from spard.data.template_arguments import read_arguments  # jinja is slow to import

    try:
        return read_arguments(text)
    except InvalidRecipe as error:
        raise CommandFailed(error.message) from None


def _try_base_model(signs: Signs, source: str, options: Mapping[str, str | None]) -> TrialFacts:
    """Load a model in a separate process, run a forward pass and a training step, and print what was found.

    `options` are those of `spard check-model`. Return what that has found, as its JSON; {} where it cannot run, as when
    torch is not installed. Raises CommandFailed if the model is not fit.
    """
    if find_spec("torch") is None:
        warn("Not tried with a forward pass: torch is not installed here.")
        return {}
    if not Path(source).is_dir() and not _is_cached(source, options["--revision"]):
        warn("Not tried with a forward pass: its files are not on this machine.")
        return {}
    given = [part for name, value in options.items() if value for part in (name, value)]
    command = python("spard.commands", "check-model", source, "--json", *given)
    signs.begin("Trying the model: loading it in a separate process, generating a reply and training one step.")
    done = subprocess.run(command, env=safe_path(os.environ), capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        last = (done.stderr.strip() or "the process ended without a message").splitlines()[-1]
        last = last.removeprefix(f"{InvalidModel.code}: ").removeprefix(f"{UnfitModel.code}: ")
        raise CommandFailed(f"The model is not offered: {last}")
    found: TrialFacts = json.loads(done.stdout)
    warn(_describe_model(found, is_default=options["--target-modules"] is None))
    return found


def _describe_model(found: TrialFacts, *, is_default: bool) -> str:
    from spard.data.template_card import PROBES_TITLE, Probe  # jinja is slow to import
    from spard.models.targets import Reach

    template = found["template"]
    probes = [line for each in template["probes"] for line in Probe(**each).lines()]
    return "\n".join(
        [
            f"Tried: {found['parameters']} parameters, rows of up to {found['positions']} tokens; tokenizer, chat "
            "template, end token, weights, a forward pass and an adapter's gradient passed their checks.",
            Reach(**found["lora_reach"]).line(is_default=is_default),
            *(f"Chat template: {line}" for line in template["lines"]),
            f"{PROBES_TITLE[0].upper()}{PROBES_TITLE[1:]}:",
            *(f"  {line}" for line in probes),
        ]
    )


def _is_cached(hub_id: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache  # takes a while to import
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(hub_id, "config.json", revision=revision), str)
    except HFValidationError:  # the service says what is wrong with such a name
        return False


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """List the models that jobs can name."""
    found = get("models")["data"]
    marks = [mark for mark in ("attested", "older_audit", "later_audit") if any(mark in each for each in found)]
    show_rows(found, ("id", "owned_by", "created", *marks), as_json)


@models.command("show")
def show_model(model: ModelName, as_json: Json = False) -> None:
    """Show one model."""
    show_record(get(f"models/{model}"), as_json)


@models.command("ask-again")
def ask_again(
    job_id: Annotated[str, typer.Argument(help="The job that made the model.")],
    step: Annotated[int, typer.Option(min=0, help="The step of a checkpoint; 0: the job's own model.")] = 0,
    as_json: Json = False,
) -> None:
    """Audit a released model again by today's audit; nothing is trained, and only a pass keeps the model released."""
    with connect() as client:
        show_record(client.post(f"admin/jobs/{job_id}/later_audits", {"step": step}), as_json)


@models.command("later-audits")
def later_audits(job_id: Annotated[str, typer.Argument(help="A job of yours.")], as_json: Json = False) -> None:
    """List the later audits of a job's model and checkpoints, with their decisions."""
    columns = ("id", "step", "audit_version", "decision", "decided_at", "reasons")
    show_rows(get(f"fine_tuning/jobs/{job_id}/later_audits")["data"], columns, as_json)


@models.command("delete")
def delete_model(model: ModelName, as_json: Json = False) -> None:
    """Delete one of your fine-tuned models or checkpoints; the job that made it stays."""
    _delete(f"models/{model}", as_json)


@pool.command("import")
def import_pool(file: Jsonl, name: Name, as_json: Json = False) -> None:
    """Import a pool of rows {"prompt", "safe"} or {"prompt", "benign": true}; a fifth, at most 300, is held out."""
    _show(_send("admin/pools", file, name=name), as_json)


@pool.command("list")
def list_pools(as_json: Json = False) -> None:
    """List all versions of all pools."""
    columns = ("name", "version", "rows", "held_out", "created_at", "id")
    show_rows(get("admin/pools")["data"], columns, as_json)


@pool.command("delete")
def delete_pool(corpus_id: Version, as_json: Json = False) -> None:
    """Delete a version of a pool and its held-out rows; refused while an unfinished job uses it."""
    _delete(f"admin/pools/{corpus_id}", as_json)


@suites.command("import")
def import_suite(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A JSONL file, or a promptfoo configuration (.yaml).")
    ],
    name: Name,
    kind: SuiteKind,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the result of the import; store nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Import a suite of rows {"prompt", "answer"?, "category"?, "language"?}, or of a promptfoo configuration.

    Of a configuration, everything that no row can hold is listed on standard error; no program in it is run.
    """
    path = "admin/suites/preview" if dry_run else "admin/suites"
    with _as_rows(file, kind) as rows:
        _show(_send(path, rows, name=name, kind=str(kind)), as_json)


@contextmanager
def _as_rows(file: Path, kind: Kind) -> Iterator[Path]:
    """Yield the file itself, or the rows of a promptfoo configuration, whose summary goes to standard error.

    Raises CommandFailed, with one line for each fault, if a configuration is malformed or none of it becomes a row.
    """
    if not _is_promptfoo(file):
        yield file
        return
    from app.move_in.promptfoo import convert  # PyYAML is slow to import, and `spard --help` does not need it

    found = convert(file, "harmful" if kind is Kind.harmful else "benign" if kind is Kind.benign else "utility")
    if found.faults or not found.rows:
        head = f"{len(found.faults)} faults in {file.name}" if found.faults else f"No test of {file.name} becomes a row"
        raise CommandFailed("\n  ".join([f"{head}; nothing is imported.", *found.findings(), *found.summary()[1:]]))
    for line in found.summary():
        warn(line)
    with TemporaryDirectory() as folder:
        rows = Path(folder, f"{file.stem}.jsonl")
        rows.write_text("".join(json.dumps(row) + "\n" for row in found.rows), encoding="utf-8")
        yield rows


def _is_promptfoo(file: Path) -> bool:
    """Return True for YAML, and for a JSON file that is one object with `tests`."""
    if file.suffix.lower() != ".json":
        return file.suffix.lower() in (".yaml", ".yml")
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # JSON lines, or nothing that could be read as a configuration
        return False
    return isinstance(found, dict) and "tests" in found


@suites.command("list")
def list_suites(as_json: Json = False) -> None:
    """List all versions of all suites."""
    show_rows(get("admin/suites")["data"], _VERSION, as_json)


@suites.command("delete")
def delete_suite(corpus_id: Version, as_json: Json = False) -> None:
    """Delete a version of a suite; refused while an unfinished job uses it."""
    _delete(f"admin/suites/{corpus_id}", as_json)


def _show(made: dict[str, Any], as_json: bool) -> None:
    """Print a created object, and then its warnings, one a line."""
    show_record(made if as_json else {name: value for name, value in made.items() if name != "warnings"}, as_json)
    for warning in () if as_json else made.get("warnings", ()):
        warn(f"warning: {warning}")


def _delete(path: str, as_json: bool) -> None:
    with connect() as client:
        deleted = client.delete(path)
    show_record(deleted, as_json)


def _send(path: str, file: Path, **params: Any) -> Any:
    with connect() as client:
        return client.send(path, file, **params)
