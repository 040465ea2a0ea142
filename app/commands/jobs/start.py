"""`spard jobs create` and `spard jobs estimate`, which send the same request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from app.commands.client import Away, Broken, Busy, Client, connect
from app.commands.jobs.watch import exit_with_job, watch
from app.commands.terminal import CommandFailed, Json, show_json, show_record, show_rows

Model = Annotated[str, typer.Option(help="The base model, see `spard models list`.")]
TrainingFile = Annotated[str, typer.Option(help="A JSONL file to upload, or the id of an uploaded file.")]
ValidationFile = Annotated[str | None, typer.Option(help="A validation file: a path or an id, like --file.")]
Epochs = Annotated[int | None, typer.Option(help="Number of passes over the training file.")]
BatchSize = Annotated[int | None, typer.Option(help="Rows per training step.")]
Rate = Annotated[float | None, typer.Option(help="Multiplier of the model's default learning rate.")]
Method = Annotated[str, typer.Option(help="supervised, or dpo for preference pairs.")]
Beta = Annotated[
    float | None, typer.Option(help="dpo only: weight of the penalty for moving away from the reference model.")
]
Defense = Annotated[str | None, typer.Option(help="spard, or none (admin keys only) to train without a defense.")]
Keep = Annotated[
    str | None, typer.Option(help="Which epoch's end to keep: last, or best by safety and then by validation loss.")
]
Stop = Annotated[
    int | None, typer.Option("--patience", help="Stop training after this many epochs without improvement.")
]
HeldOutRows = Annotated[
    int | None,
    typer.Option(help="Rows kept out of the training, at most, to show whether the task was learned; 0: none."),
]
Safety = Annotated[str | None, typer.Option(help="The whole `safety` object as JSON, instead of --defense.")]


def create_job(
    model: Model,
    file: TrainingFile,
    validation_file: ValidationFile = None,
    suffix: Annotated[str | None, typer.Option(help="Suffix of the new model's name.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed and data give the same adapter.")] = None,
    keep: Keep = None,
    patience: Stop = None,
    held_out_rows: HeldOutRows = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    learning_rate_multiplier: Rate = None,
    method: Method = "supervised",
    beta: Beta = None,
    defense: Defense = None,
    safety: Safety = None,
    follow: Annotated[bool, typer.Option(help="Follow the job to its end, as `spard jobs watch` does.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a base model on a file."""
    numbers = {"n_epochs": epochs, "batch_size": batch_size, "learning_rate_multiplier": learning_rate_multiplier}
    learned = _method(method, numbers | {"beta": beta})
    with connect() as client, _discard_on_refusal(client) as uploaded:
        ask = _ask(client, model, (file, validation_file), learned, _safety(defense, safety), uploaded)
        ending = {name: value for name, value in {"keep": keep, "patience": patience}.items() if value is not None}
        named = {"suffix": suffix, "seed": seed, "ending": ending or None, "held_out_rows": held_out_rows}
        ask |= {name: value for name, value in named.items() if value is not None}
        job = client.post("fine_tuning/jobs", ask, {"idempotency-key": uuid4().hex})
        uploaded.clear()  # the job exists and needs its files, whatever fails from here on
        if not follow:
            return show_record(job, as_json)
        job = watch(client, job["id"], as_json=as_json)
    return exit_with_job(job)


def estimate_job(
    model: Model,
    file: TrainingFile,
    validation_file: ValidationFile = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    learning_rate_multiplier: Rate = None,
    method: Method = "supervised",
    beta: Beta = None,
    defense: Defense = None,
    safety: Safety = None,
    as_json: Json = False,
) -> None:
    """Estimate a job's tokens, steps, memory and time. A file given by its path is uploaded first."""
    numbers = {"n_epochs": epochs, "batch_size": batch_size, "learning_rate_multiplier": learning_rate_multiplier}
    learned = _method(method, numbers | {"beta": beta})
    with connect() as client:
        ask = _ask(client, model, (file, validation_file), learned, _safety(defense, safety))
        found = client.post("fine_tuning/jobs/estimate", ask)
    if as_json:
        return show_json(found | {"training_file": ask["training_file"]})
    warnings, numbers = found.pop("warnings"), found.pop("hyperparameters")
    plan, stages = found.pop("memory_plan"), found.pop("stages")
    show_record({"training_file": ask["training_file"]} | found | numbers, as_json)
    if stages:
        show_rows(stages, ("stage", "seconds", "units", "unit"), as_json=False)
    if plan is not None:
        typer.echo(plan["text"])
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    return None


@contextmanager
def _discard_on_refusal(client: Client) -> Iterator[list[str]]:
    """Yield a list for the ids of uploaded files; if the service refuses the job, these files are deleted."""
    uploaded: list[str] = []
    try:
        yield uploaded
    except CommandFailed as error:
        if not isinstance(error, Away | Broken | Busy):  # after these the job may exist and need its files
            for file_id in uploaded:
                with suppress(CommandFailed):
                    client.delete(f"files/{file_id}")
        raise


def _ask(
    client: Client,
    model: str,
    files: tuple[str, str | None],
    method: dict[str, Any],
    safety: Any,
    uploaded: list[str] | None = None,
) -> dict[str, Any]:
    """Return the body for a new job or an estimate; upload local files, and append their ids to `uploaded`."""
    uploaded = [] if uploaded is None else uploaded
    training, validation = files
    ask = {"model": model, "training_file": _file_id(client, training, uploaded), "method": method}
    if validation:
        ask["validation_file"] = _file_id(client, validation, uploaded)
    return ask | ({"safety": safety} if safety is not None else {})


def _method(name: str, numbers: dict[str, float | None]) -> dict[str, Any]:
    """Return OpenAI's `method` object with the hyperparameters that are not None; raise CommandFailed if invalid."""
    if name not in ("supervised", "dpo") or (numbers["beta"] is not None and name != "dpo"):
        raise CommandFailed("--method is supervised or dpo, and --beta belongs to dpo")
    given = {setting: number for setting, number in numbers.items() if number is not None}
    return {"type": name, name: {"hyperparameters": given}}


def _file_id(client: Client, file: str, uploaded: list[str]) -> str:
    """Return the id of a file, which is uploaded first if a path is given.

    Raises CommandFailed for a file with bad rows; it stays uploaded, so that `spard files show` can explain them.
    """
    path = Path(file)
    if not path.exists():
        if not file.startswith("file-"):
            raise CommandFailed(f"There is no file {file}.")
        return file
    if not path.is_file():
        raise CommandFailed(f"{file} is a folder; name a JSONL file.")
    sent = client.send("files", path, {"purpose": "fine-tune"})
    if sent["status"] == "error":
        raise CommandFailed(f"{file}: {sent['status_details']} (all of it: spard files show {sent['id']})")
    uploaded.append(str(sent["id"]))
    return uploaded[-1]


def _safety(defense: str | None, safety: str | None) -> Any:
    if safety is not None:
        try:
            return json.loads(safety)
        except ValueError as error:
            raise CommandFailed(f"--safety is no JSON: {error}") from None
    return {"defense": {"type": defense}} if defense else None
