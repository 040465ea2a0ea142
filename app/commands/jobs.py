"""spard jobs: fine-tune, follow, fetch the adapter and the safety report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.files import send
from app.commands.terminal import CommandFailed, Json, connect, get, say, show_json, show_record, show_rows

if TYPE_CHECKING:
    from openai import OpenAI

jobs = typer.Typer(no_args_is_help=True, help="Fine-tuning jobs.")

_TERMINAL = ("succeeded", "failed", "cancelled")
_POLL_S = 1.0


@jobs.command("create")
def create_job(
    model: Annotated[str, typer.Option(help="A base model, see `spard models list`.")],
    file: Annotated[str, typer.Option(help="A JSONL file to upload, or the id of one that is.")],
    validation_file: Annotated[str | None, typer.Option(help="The same, to measure on.")] = None,
    suffix: Annotated[str | None, typer.Option(help="A part of the new model's name.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed and data, same adapter.")] = None,
    epochs: Annotated[int | None, typer.Option()] = None,
    batch_size: Annotated[int | None, typer.Option()] = None,
    learning_rate_multiplier: Annotated[float | None, typer.Option()] = None,
    method: Annotated[str, typer.Option(help="supervised, or dpo for preference pairs.")] = "supervised",
    beta: Annotated[float | None, typer.Option(help="Of dpo: how dear it is to leave the reference.")] = None,
    defense: Annotated[str | None, typer.Option(help="spard, or none for a provider's measurement.")] = None,
    safety: Annotated[str | None, typer.Option(help="The whole `safety` object as JSON, instead of --defense.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for the end and show what happens.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a base model on a file."""
    numbers = {
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate_multiplier": learning_rate_multiplier,
        "beta": beta,
    }
    if method not in ("supervised", "dpo") or (beta is not None and method != "dpo"):
        raise CommandFailed("--method is supervised or dpo, and --beta belongs to dpo")
    hyperparameters = {name: number for name, number in numbers.items() if number is not None}
    ask: dict[str, Any] = {
        "model": model,
        "training_file": _file_id(file),
        "validation_file": _file_id(validation_file) if validation_file else None,
        "suffix": suffix,
        "seed": seed,
        "method": {"type": method, method: {"hyperparameters": hyperparameters}},
        "extra_body": _extra(defense, safety),
    }
    with connect() as client:
        job = client.fine_tuning.jobs.create(**ask)
    show_record(job.to_dict(), as_json)
    if follow:
        follow_job(job.id)


@jobs.command("list")
def list_jobs(limit: int = 20, as_json: Json = False) -> None:
    """Your jobs, newest first."""
    with connect() as client:
        found = [job.to_dict() for job in client.fine_tuning.jobs.list(limit=limit).data]
    show_rows(found, ("id", "model", "status", "safety.phase", "safety.gate.decision", "created_at"), as_json)


@jobs.command("show")
def show_job(job_id: str, as_json: Json = False) -> None:
    """One job."""
    with connect() as client:
        job = client.fine_tuning.jobs.retrieve(job_id).to_dict()
    show_record(job, as_json)


@jobs.command("events")
def show_events(job_id: str, limit: int = 100, as_json: Json = False) -> None:
    """Show what happened, the latest last."""
    with connect() as client:
        events = client.fine_tuning.jobs.list_events(job_id, limit=limit).data[::-1]
    show_rows([event.to_dict() for event in events], ("created_at", "level", "message"), as_json)


@jobs.command("follow")
def follow_job(job_id: str) -> None:
    """Show events as they happen; exits 0 if the job succeeds."""
    with connect() as client:
        status = _follow(client, job_id)
    say(f"{job_id} {status}")
    raise typer.Exit(0 if status == "succeeded" else 1)


@jobs.command("cancel")
def cancel_job(job_id: str) -> None:
    """Cancel a job that has not ended."""
    with connect() as client:
        client.fine_tuning.jobs.cancel(job_id)
    say(f"{job_id} cancelled")


@jobs.command("adapter")
def fetch_adapter(
    job_id: str, out: Annotated[Path | None, typer.Option(help="Default: JOB_ID-adapter.tar.gz here.")] = None
) -> None:
    """Download the adapter of a job that has succeeded."""
    path = out or Path(f"{job_id}-adapter.tar.gz")
    with connect() as client:
        path.write_bytes(client.get(f"/fine_tuning/jobs/{job_id}/adapter", cast_to=bytes))
    say(f"wrote {path}")


@jobs.command("checkpoints")
def list_checkpoints(job_id: str, as_json: Json = False) -> None:
    """Show the ends of a job's last three epochs, with their losses and audits."""
    with connect() as client:
        found = [each.to_dict() for each in client.fine_tuning.jobs.checkpoints.list(job_id)]
    columns = ("step_number", "metrics.train_loss", "metrics.full_valid_loss", "safety.gate.decision")
    show_rows(found, (*columns, "fine_tuned_model_checkpoint"), as_json)


@jobs.command("checkpoint")
def fetch_checkpoint(
    job_id: str,
    step: Annotated[int, typer.Argument(help="See `spard jobs checkpoints`.")],
    out: Annotated[Path | None, typer.Option(help="Default: JOB_ID-step-STEP-adapter.tar.gz here.")] = None,
) -> None:
    """Download the adapter of a checkpoint that passed its audit."""
    path = out or Path(f"{job_id}-step-{step}-adapter.tar.gz")
    with connect() as client:
        found = [each for each in client.fine_tuning.jobs.checkpoints.list(job_id) if each.step_number == step]
        if not found:
            raise CommandFailed(f"{job_id} has no checkpoint of step {step}; see spard jobs checkpoints {job_id}")
        url = f"/fine_tuning/jobs/{job_id}/checkpoints/{found[0].id}/adapter"
        path.write_bytes(client.get(url, cast_to=bytes))
    say(f"wrote {path}")


@jobs.command("safety")
def show_safety(job_id: str) -> None:
    """Print the safety report, a rejected job's too."""
    show_json(get(f"/fine_tuning/jobs/{job_id}/safety"))


def _follow(client: OpenAI, job_id: str) -> str:
    """Show each event once, until the job has ended; how it did."""
    seen: set[str] = set()
    while True:
        status = client.fine_tuning.jobs.retrieve(job_id).status
        for event in client.fine_tuning.jobs.list_events(job_id, limit=1000).data[::-1]:
            if event.id not in seen:
                seen.add(event.id)
                say(f"{time.strftime('%H:%M:%S', time.localtime(event.created_at))}  {event.message}")
        if status in _TERMINAL:
            return status
        time.sleep(_POLL_S)


def _file_id(file: str) -> str:
    """Return the id of a file; upload it first if a path is given."""
    path = Path(file)
    if not path.exists():
        if not file.startswith("file-"):
            raise CommandFailed(f"There is no file {file}.")
        return file
    sent = send(path)
    if sent["status"] == "error":
        raise CommandFailed(f"{file}: {sent['status_details']} (all of it: spard files show {sent['id']})")
    file_id: str = sent["id"]
    return file_id


def _extra(defense: str | None, safety: str | None) -> dict[str, Any]:
    if safety is not None:
        try:
            return {"safety": json.loads(safety)}
        except ValueError as error:
            raise CommandFailed(f"--safety is no JSON: {error}") from None
    return {"safety": {"defense": {"type": defense}}} if defense else {}
