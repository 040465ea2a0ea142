"""Commands of `spard jobs` for jobs that exist: follow and change them, show what they measured, fetch what they made.

`list`, `show`, `events` and `metrics` show how jobs are; `pause`, `resume`, `cancel` and `delete` change them;
`report`, `safety`, `risky-rows`, `task-replies` and `compare` show what was measured; `adapter`, `checkpoints` and
`checkpoint` list, download and verify what was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from app.commands.client import Client, Download, connect, download, get
from app.commands.terminal import CommandFailed, Json, say, show_json, show_record, show_rows, warn
from spard.errors import InvalidKey, NotProved
from spard.release.task_check import reply_lines

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


_SUITES = ("suite", "kind", "model", "hits", "of", "rate", "interval", "unscored")
_COMPARED = range(2, 5)
Page = Annotated[
    Path | None, typer.Option("--html", dir_okay=False, help="Save the report as an HTML page in this file.")
]
_NOT_AUDITED = {"decision": "not audited"}
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Check the signature and every byte, as `spard verify` does.")
]


def show_report(
    job_id: JobId,
    html: Page = None,
    save: Annotated[
        bool, typer.Option("--save", help="Save the report as JOB_ID-report.html in the current folder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a job's verdict and the audit's counts suite by suite, also for a job that failed its gate."""
    page = html or (Path(f"{job_id}-report.html") if save else None)
    with connect() as client:
        job = client.get(f"fine_tuning/jobs/{job_id}")
        verdict = client.get(f"fine_tuning/jobs/{job_id}/safety/verdict")
        report = client.get(f"fine_tuning/jobs/{job_id}/safety")
        if page:
            _write(page, client.text(f"fine_tuning/jobs/{job_id}/safety", accept="text/html"))
    if as_json:
        return show_json({"verdict": verdict, "report": report} | ({"page": str(page)} if page else {}))
    _tell_verdict(verdict)
    tell_warnings(job)
    rows = [*_suites(report)]
    if rows:
        show_rows(rows, _SUITES, as_json)
    if page:
        say(f"wrote {page}")
    return None


def show_safety(
    job_id: JobId,
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON.")] = False,
) -> None:
    """Print the whole safety report as JSON, also for a job that failed its gate."""
    show_json(get(f"fine_tuning/jobs/{job_id}/safety"))


def list_risky_rows(job_id: JobId, as_json: Json = False) -> None:
    """List the rows of the training file that look most like harm, with the reasons; nothing is removed."""
    found = get(f"fine_tuning/jobs/{job_id}/safety/risky_rows")["data"]
    show_rows(found, ("line", "score", "cosine", "own_refusal", "verdict", "reasons", "dropped", "excerpt"), as_json)


def list_task_replies(job_id: JobId, as_json: Json = False) -> None:
    """Show what base and fine-tuned model reply to requests of your rows that were not trained on."""
    found = get(f"fine_tuning/jobs/{job_id}/task_replies")["data"]
    if as_json:
        return show_json(found)
    for each in found:
        for line in reply_lines(each):
            say(line)
    return None


def compare_jobs(
    job_ids: Annotated[list[str], typer.Argument(help="Two to four jobs.")], as_json: Json = False
) -> None:
    """Show two to four jobs side by side: settings, losses and audit results."""
    if len(job_ids) not in _COMPARED:
        raise typer.BadParameter("Name two to four jobs.")
    with connect() as client:
        columns = {job_id: _column(client, job_id) for job_id in dict.fromkeys(job_ids)}
    if as_json:
        return show_json([{"id": job_id} | found for job_id, found in columns.items()])
    names = [*dict.fromkeys(name for found in columns.values() for name in found)]
    rows = [{"": name} | {job_id: found.get(name) for job_id, found in columns.items()} for name in names]
    return show_rows(rows, ("", *columns), as_json)


def _column(client: Client, job_id: str) -> dict[str, Any]:
    """Return the compared fields of one job; rates that were not measured are left out."""
    job = client.get(f"fine_tuning/jobs/{job_id}")
    safety, verdict = job["safety"], client.get(f"fine_tuning/jobs/{job_id}/safety/verdict")
    losses = [row["loss/task"] for row in client.get(f"fine_tuning/jobs/{job_id}/metrics")["data"]]
    found = {
        "model": job["model"],
        "status": job["status"],
        "verdict": verdict["headline"],
        "gate": (safety["gate"] or {}).get("decision"),
        "defense": safety["defense"]["type"],
        **job["hyperparameters"],
        "seed": job["seed"],
        "training file": job["training_file"],
        "trained tokens": job["trained_tokens"],
        "last training loss": f"{losses[-1]:.4g}" if losses else None,
    }
    for name in ("asr", "harmfulness_score", "over_refusal", "utility"):
        measured = safety[name] or {}
        if measured.get("adapter") is not None:
            before = measured.get("base")
            found[name] = f"{measured['adapter']:.4g}" + (f" (base model {before:.4g})" if before is not None else "")
    return found


def _tell_verdict(verdict: Any) -> None:
    say(f"{verdict['pill']}: {verdict['headline']}")
    for text in (verdict["sentence"], *verdict["reasons"]):
        if text:
            say(text)


def tell_warnings(job: Any) -> None:
    """Print a job's warnings."""
    for text in job["warnings"]:
        say(f"warning: {text}")


def _suites(report: Any) -> list[dict[str, str]]:
    """Return the rows of the audit's table: for each suite the base model, then the adapter."""
    base = {each["suite"]: each for each in report.get("base") or ()}
    found = []
    for each in report.get("adapter") or ():
        for model, result in (("base", base.get(each["suite"])), ("this", each)):
            if result is not None:
                found.append(_suite(model, result))
    return found


def _suite(model: str, result: Any) -> dict[str, str]:
    rate, ends = result.get("rate"), (result.get("low"), result.get("high"))
    is_scored = rate is not None and None not in ends
    return {
        "suite": result["suite"],
        "kind": result["kind"],
        "model": model,
        "hits": str(result["hits"]),
        "of": str(result["n"]),
        "rate": f"{rate:.1%}" if is_scored else "-",
        "interval": f"{ends[0]:.1%} to {ends[1]:.1%}" if is_scored else "-",
        "unscored": str(result.get("unscored") or ""),
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}.") from None


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
    _tell_saved(saved, as_json, is_verified=is_verified)


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
    _tell_saved(saved, as_json, is_verified=is_verified)


def _fetch_adapter(client: Client, job_id: str, url: str, path: Path, *, is_verified: bool) -> Download:
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


def _tell_saved(saved: Download, as_json: bool, *, is_verified: bool) -> None:
    if as_json:
        facts = {"path": str(saved.path), "bytes": saved.bytes, "sha256": saved.sha256}
        return show_json(facts | {"resumed_at": saved.resumed_at, "verified": is_verified})
    if saved.resumed_at:
        say(f"went on after {saved.resumed_at} bytes that were here")
    if is_verified:
        say("every byte is as signed")
    return say(f"wrote {saved.path}")
