"""`spard jobs list`, `show`, `events`, `metrics`, `pause`, `resume`, `cancel` and `delete`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.commands.client import connect, get
from app.commands.terminal import Json, say, show_json, show_record, show_rows

_LISTED = {
    "id": "id",
    "model": "model",
    "status": "status",
    "safety.phase": "stage",
    "safety.gate.decision": "gate",
    "created_at": "created",
}
JobId = Annotated[str, typer.Argument(help="The job's id, see `spard jobs list`.")]


def list_jobs(
    limit: Annotated[int, typer.Option(min=1, help="List only the newest N jobs.")] = 20, as_json: Json = False
) -> None:
    """List your jobs, newest first."""
    with connect() as client:
        found = list(client.pages("fine_tuning/jobs", limit))
    show_rows(found, _LISTED, as_json)


def show_job(job_id: JobId, as_json: Json = False) -> None:
    """Show all fields of one job."""
    show_record(get(f"fine_tuning/jobs/{job_id}"), as_json)


def show_events(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, help="Show only the newest N events.")] = 100,
    as_json: Json = False,
) -> None:
    """Show a job's events, oldest first."""
    with connect() as client:
        events = list(client.pages(f"fine_tuning/jobs/{job_id}/events", limit))[::-1]
    show_rows(events, ("created_at", "level", "message"), as_json)


def show_metrics(
    job_id: JobId,
    last: Annotated[int, typer.Option(min=0, help="Show only the last N steps; 0: all.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the metrics of every training step: losses, norms, safety steps."""
    rows = get(f"fine_tuning/jobs/{job_id}/metrics")["data"][-last:]
    names = sorted({name for row in rows for name in row} - {"step"})
    shown = [row if as_json else {name: _short(value) for name, value in row.items()} for row in rows]
    show_rows(shown, ("step", *names), as_json)


def pause_job(job_id: JobId, as_json: Json = False) -> None:
    """Pause a job that has not ended; a running one saves its state first."""
    _change(job_id, "pause", "is to pause; it goes on with: spard jobs resume {}", as_json)


def resume_job(job_id: JobId, as_json: Json = False) -> None:
    """Resume a paused job from its saved state."""
    _change(job_id, "resume", "is queued again; see how it goes on with: spard jobs watch {}", as_json)


def cancel_job(
    job_id: JobId,
    audit_last: Annotated[
        bool,
        typer.Option(
            "--audit-last", help="First audit the checkpoints of its last epochs, so that they can be released."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Cancel a job that has not ended."""
    words = "cancelled; see what its audits find with: spard jobs checkpoints {}" if audit_last else "cancelled"
    _change(job_id, "cancel", words, as_json, audit_last=audit_last or None)


def delete_job(
    job_id: JobId,
    include_files: Annotated[bool, typer.Option("--include-files", help="Also erase its training files.")] = False,
    as_json: Json = False,
) -> None:
    """Erase a job that has ended, with its results, checkpoints and adapter."""
    with connect() as client:
        gone = client.delete(f"fine_tuning/jobs/{job_id}", include_files=include_files)
    show_record(gone, as_json)


def _change(job_id: str, action: str, words: str, as_json: bool, *, audit_last: bool | None = None) -> None:
    with connect() as client:
        job: Any = client.post(f"fine_tuning/jobs/{job_id}/{action}", audit_last=audit_last)
    if as_json:
        return show_json(job)
    return say(f"{job_id} {words.format(job_id)}")


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
