"""`spard jobs watch`: follow a job's events over the service's stream; the job runs on without a watcher."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from app.commands.client import Away, Broken, Busy, Client, connect
from app.commands.jobs.manage import JobId, tell_warnings
from app.commands.terminal import CommandFailed, Json, say, warn
from spard.commands.exits import ERROR, NOT_PASSED

if TYPE_CHECKING:
    from httpx2 import ServerSentEvent
    from rich.progress import Progress

_GATE = "safety_gate_failed"
_LOOK_S = 2.0  # between two requests for progress and time left
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # before reconnecting to a service that went away
_STAGES = {
    "validate": "checking files",
    "embed": "reading rows",
    "select": "choosing safe examples",
    "train": "training",
    "audit": "auditing",
    "package": "proving and signing",
}


def watch_job(job_id: JobId, as_json: Json = False) -> None:
    """Follow a job to its end and show the result; Ctrl-C leaves it running.

    Exits 0 if the job succeeds, 2 if its safety gate did not pass, and else 1. With --json each event is a line of
    JSON, and the last line is the job.
    """
    with connect() as client:
        job = watch(client, job_id, as_json=as_json)
    exit_with_job(job)


def watch(client: Client, job_id: str, *, as_json: bool = False) -> Any:
    """Print a job's events until it has ended, and return the job; show a progress bar on a terminal.

    With `as_json` each event, and last the job, is one line of JSON. Raises CommandFailed if the service stays away.
    """
    try:
        if as_json:
            job = _follow(client, job_id, _JsonLines())
            _JsonLines().tell(job)
        elif sys.stdout.isatty():
            with _live(client, job_id) as view:
                job = _follow(client, job_id, view)
        else:
            job = _follow(client, job_id, _Lines())
        if not as_json:
            _conclude(client, job)
    except KeyboardInterrupt:
        warn(f"{job_id} continues; watch it again with: spard jobs watch {job_id}")
        raise
    return job


def exit_with_job(job: Any) -> None:
    """Exit with 2 if the job's gate did not pass, with 1 if it failed otherwise; return if it succeeded."""
    if job["status"] != "succeeded":
        raise typer.Exit(NOT_PASSED if (job["error"] or {}).get("code") == _GATE else ERROR)


class _Lines:
    """Prints one line for each event, for logs and pipes."""

    def tell(self, event: Any) -> None:
        say(_line(event))

    def step(self, event: Any) -> None:
        say(_line(event))

    def look(self, job: Any) -> None:
        """Print the current activity of a job that has printed nothing for some seconds."""
        if doing := job["safety"]["progress"].get("doing"):
            say(_line({"created_at": time.time(), "message": f"{doing[0].upper()}{doing[1:]}"}))


class _JsonLines:
    """Prints one line of JSON for each event."""

    def tell(self, event: Any) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    step = tell

    def look(self, job: Any) -> None:
        """Write nothing: the lines are events."""


class _Bar:
    """Shows a progress bar with stage, time left and both losses; events other than steps scroll by above it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar = progress.add_task("waiting", total=100.0, left="", losses="")

    def tell(self, event: Any) -> None:
        self._progress.console.print(Text(_line(event)))

    def step(self, event: Any) -> None:
        numbers = event.get("data") or {}
        losses = [f"{name} {numbers[key]:.3f}" for name, key in _LOSSES.items() if numbers.get(key) is not None]
        self._progress.update(self._bar, losses="  ".join(losses))

    def look(self, job: Any) -> None:
        """Update the bar from the job: stage or status, progress, and time left or place in the queue."""
        progress, status = job["safety"]["progress"], job["status"]
        stage = _STAGES.get(job["safety"]["phase"], job["safety"]["phase"]) if status == "running" else status
        place = progress.get("queue_position")
        left = f"number {place} in your queue" if place else _time_left(progress.get("eta_seconds"))
        left = progress.get("queue_reason") or (progress.get("doing") if status == "running" else None) or left
        self._progress.update(self._bar, description=stage, completed=progress["percent"], left=left)


_LOSSES = {"loss": "train_loss", "safe loss": "safe_loss"}
_View = _Lines | _JsonLines | _Bar


@contextmanager
def _live(client: Client, job_id: str) -> Iterator[_Bar]:
    """Yield a progress bar that a background thread keeps up to date."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # takes a while to import

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    more = TextColumn("{task.fields[left]}"), TextColumn("[dim]{task.fields[losses]}")
    stop = Event()
    with Progress(*columns, *more, console=Console(highlight=False)) as progress:
        bar = _Bar(progress)
        looking = Thread(target=_keep_looking, args=(client, job_id, bar, stop), daemon=True)
        looking.start()
        try:
            yield bar
        finally:
            stop.set()
            looking.join(_LOOK_S)


def _keep_looking(client: Client, job_id: str, bar: _Bar, stop: Event) -> None:
    while not stop.is_set():
        with suppress(CommandFailed):  # the event stream reports the problem and reconnects
            bar.look(client.get(f"fine_tuning/jobs/{job_id}"))
        stop.wait(_LOOK_S)


def _follow(client: Client, job_id: str, view: _View) -> Any:
    """Show each event once until the job has ended, and return the job; reconnect if the connection breaks."""
    seen, waits = "", iter(_WAITS_S)
    while True:
        try:
            with client.events(
                f"fine_tuning/jobs/{job_id}/stream", **({"last-event-id": seen} if seen else {})
            ) as news:
                for event in news:
                    waits = iter(_WAITS_S)  # any event shows that the service is back
                    seen = event.id or seen
                    if event.event == "done":
                        return event.json()
                    _show(view, event)
            client.get(f"fine_tuning/jobs/{job_id}")  # raises if the stream ended because the job was erased
            time.sleep(_WAITS_S[0])
        except (Away, Broken, Busy):
            if (wait_s := next(waits, None)) is None:
                raise
            warn(f"The connection broke; trying again in {wait_s:g} s.")
            time.sleep(wait_s)


def _show(view: _View, news: ServerSentEvent) -> None:
    match news.event:
        case "event":
            view.tell(news.json())
        case "metrics":
            view.step(news.json())
        case "heartbeat":
            view.look(news.json())


def _conclude(client: Client, job: Any) -> None:
    """Print the job's verdict, its warnings and its model."""
    found = client.get(f"fine_tuning/jobs/{job['id']}/safety/verdict")
    pill = "" if found["pill"].lower() == job["status"] else f"{found['pill']}. "
    say(f"{job['id']} {job['status']}: {pill}{found['headline']}")
    for text in (found["sentence"], *found["reasons"]):
        if text:
            say(text)
    if check := job["safety"].get("task_check"):
        say(f"Your task: {check['words']}")
        if check["replies"] and job["status"] == "succeeded":
            say(f"Its replies to {check['replies']} of your rows: spard jobs task-replies {job['id']}")
    if evidence := job["safety"].get("evidence"):
        say(f"Evidence: {evidence['words']}")
    tell_warnings(job)
    if job["fine_tuned_model"]:
        say(f"model: {job['fine_tuned_model']}; its adapter: spard jobs adapter {job['id']}")


def _line(event: Any) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event['created_at']))}  {event['message']}"


def _time_left(seconds: float | None) -> str:
    """Format the remaining time in its two largest units."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min left"
        if hours
        else f"{minutes} min {rest:02} s left"
        if minutes
        else f"{rest} s left"
    )
