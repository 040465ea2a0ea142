"""`spard jobs adapter`, `checkpoints` and `checkpoint`: list, download and verify what a job has trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from app.commands.client import Client, connect
from app.commands.downloads import Saved, download
from app.commands.jobs.running import JobId
from app.commands.terminal import CommandFailed, Json, say, show_json, show_rows, warn
from spard.errors import InvalidKey, NotProved

_NOT_AUDITED = {"decision": "not audited"}
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Check the signature and every byte, as `spard verify` does.")
]


def fetch_adapter(
    job_id: JobId,
    out: Annotated[Path | None, typer.Option(help="File to write; default: JOB_ID-adapter.tar.gz.")] = None,
    is_verified: Verify = True,
    as_json: Json = False,
) -> None:
    """Download and verify the adapter of a job that has succeeded; an interrupted download is resumed."""
    path = out or Path(f"{job_id}-adapter.tar.gz")
    with connect() as client:
        saved = _fetch_adapter(client, job_id, f"fine_tuning/jobs/{job_id}/adapter", path, is_verified=is_verified)
    _tell(saved, as_json, is_verified=is_verified)


def list_checkpoints(job_id: JobId, as_json: Json = False) -> None:
    """List the checkpoints of a job's last three epochs, with their losses and audits."""
    with connect() as client:
        found = list(client.pages(f"fine_tuning/jobs/{job_id}/checkpoints", 1000))
    rows = [each if as_json or each["safety"] else {**each, "safety": {"gate": _NOT_AUDITED}} for each in found]
    columns = ("step_number", "metrics.train_loss", "metrics.full_valid_loss", "safety.gate.decision")
    show_rows(rows, (*columns, "fine_tuned_model_checkpoint"), as_json)


def fetch_checkpoint(
    job_id: JobId,
    step: Annotated[int, typer.Argument(help="The checkpoint's step, see `spard jobs checkpoints`.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: JOB_ID-step-STEP-adapter.tar.gz.")] = None,
    is_verified: Verify = True,
    as_json: Json = False,
) -> None:
    """Download and verify the adapter of a checkpoint that passed its audit; an interrupted download is resumed."""
    path = out or Path(f"{job_id}-step-{step}-adapter.tar.gz")
    with connect() as client:
        listed = client.pages(f"fine_tuning/jobs/{job_id}/checkpoints", 1000)
        found = [each["id"] for each in listed if each["step_number"] == step]
        if not found:
            raise CommandFailed(f"{job_id} has no checkpoint of step {step}; see spard jobs checkpoints {job_id}")
        url = f"fine_tuning/jobs/{job_id}/checkpoints/{found[0]}/adapter"
        saved = _fetch_adapter(client, job_id, url, path, is_verified=is_verified)
    _tell(saved, as_json, is_verified=is_verified)


def _fetch_adapter(client: Client, job_id: str, url: str, path: Path, *, is_verified: bool) -> Saved:
    if not is_verified:
        return download(client, url, path)
    with _proofs(client, job_id) as (known, waiver):
        return download(client, url, path, lambda part: _verify(part, known, waiver))


@contextmanager
def _proofs(client: Client, job_id: str) -> Iterator[tuple[Path | None, Path | None]]:
    """Yield temporary files of the service's signing keys and the job's waiver, None for one that does not exist."""
    with TemporaryDirectory() as folder:
        keys, waiver = Path(folder, "keys.json"), Path(folder, "waiver.json")
        try:
            keys.write_text(client.text("signing_keys", accept="application/json"))
        except CommandFailed:  # the service has no key, or is an older version without this route
            warn("The service does not publish its signing keys: who signed the adapter is not proved.")
        if client.get(f"fine_tuning/jobs/{job_id}")["safety"].get("waiver"):
            waiver.write_text(json.dumps(client.get(f"fine_tuning/jobs/{job_id}/waiver")))
        yield (keys if keys.exists() else None), (waiver if waiver.exists() else None)


def _verify(archive: Path, known: Path | None, waiver: Path | None) -> None:
    from spard.commands.proofs import check_adapter  # loads cryptography, once the bytes are here

    try:
        check_adapter(archive, None, str(known) if known else None, waiver)
    except (NotProved, InvalidKey) as error:
        raise CommandFailed(f"The adapter is refused, and was removed: {error.message}") from None


def _tell(saved: Saved, as_json: bool, *, is_verified: bool) -> None:
    if as_json:
        facts = {"path": str(saved.path), "bytes": saved.bytes, "sha256": saved.sha256}
        return show_json(facts | {"resumed_at": saved.resumed_at, "verified": is_verified})
    if saved.resumed_at:
        say(f"went on after {saved.resumed_at} bytes that were here")
    if is_verified:
        say("every byte is as signed")
    return say(f"wrote {saved.path}")
