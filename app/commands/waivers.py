"""`spard waivers`: propose and approve the release of an adapter that failed the gate."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from app.commands.client import connect, get
from app.commands.terminal import CommandFailed, Json, say, show_json, show_record, show_rows

waivers = typer.Typer(no_args_is_help=True, help="Release an adapter that failed the gate, by two admins.")

JobId = Annotated[str, typer.Argument(help="The job whose adapter was held back.")]
_DAY_S = 86_400


@waivers.command("list")
def list_waivers(job_id: JobId, as_json: Json = False) -> None:
    """List the waivers of a job, newest first."""
    columns = ("id", "status", "reason", "proposed_by", "approved_by", "expires_at")
    show_rows(get(f"admin/jobs/{job_id}/waivers")["data"], columns, as_json)


@waivers.command("propose")
def propose_waiver(
    job_id: JobId,
    reason: Annotated[str, typer.Option(help="The reason; it becomes part of the signed record.")],
    days: Annotated[float, typer.Option(min=0.01, max=366, help="Days until the waiver expires.")] = 30,
    expires: Annotated[
        str | None, typer.Option("--expires", "--expires-at", help="Expiry date instead of --days, such as 2026-12-31.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Propose to release a job's adapter; nothing is released until another admin approves."""
    until = _moment(expires) if expires else int(time.time() + days * _DAY_S)
    ask = {"reason": reason, "expires_at": until}
    with connect() as client:
        made = client.post(f"admin/jobs/{job_id}/waivers", ask)
    show_record(made, as_json)
    if not as_json:
        say(f"another admin approves it with: spard waivers approve {job_id} {made['id']}")


def _moment(text: str) -> int:
    """Return an ISO date or time as Unix seconds; without a time zone, this machine's zone applies."""
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        example = f"{text!r} is no date, such as 2026-12-31; a number of days goes to --days."
        raise typer.BadParameter(example, param_hint="--expires") from None


@waivers.command("approve")
def approve_waiver(
    job_id: JobId,
    waiver_id: Annotated[str, typer.Argument(help="The waiver's id, see `spard waivers list JOB_ID`.")],
    as_json: Json = False,
) -> None:
    """Approve another admin's proposal: the adapter is released until the waiver expires."""
    with connect() as client:
        made = client.post(f"admin/jobs/{job_id}/waivers/{waiver_id}/approve")
    shown = made if as_json else {name: value for name, value in made.items() if name not in ("record", "signature")}
    show_record(shown, as_json)


@waivers.command("download")
def download_waiver(
    job_id: JobId,
    out: Annotated[Path | None, typer.Option(help="File to write; default: JOB_ID-waiver.json.")] = None,
    as_json: Json = False,
) -> None:
    """Save the signed record that released your job's adapter, for `spard verify --waiver`."""
    found, path = get(f"fine_tuning/jobs/{job_id}/waiver"), out or Path(f"{job_id}-waiver.json")
    try:
        path.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}.") from None
    if as_json:
        return show_json({"path": str(path)} | found)
    return say(f"wrote {path}")
