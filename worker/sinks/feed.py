"""Feed a job's metric sinks from the worker, without ever raising into the job or waiting for a tracker.

Each sink is a process that reads lines from a pipe. A sink that is missing, fails or hangs is logged and given up, and
its remaining lines are dropped. It gets the tracker's own environment variables, and no secret of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread, Timer
from typing import IO, Any, cast

import structlog

from app.db.tables import Job
from app.db.tables.job_spec import IntegrationRef
from app.errors import Unfit
from app.ops.processes import python, safe_path
from app.settings import Settings
from spard.release.figures import rename_metrics
from worker.sinks import SINKS
from worker.sinks.base import PROJECT, RunFacts, Status

_QUEUED = 10_000  # lines that wait at most for a sink that is slower than the training
_NAMES = frozenset(
    {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"}
)
_PREFIXES = ("LC_", "MLFLOW_", "TENSORBOARD_", "TRACKIO_", "WANDB_", "SPARD_SINK_")
_FIGURES = ("asr", "over_refusal", "harmfulness_score", "utility")

Line = Mapping[str, Any]


def check(settings: Settings) -> None:
    """Raise `Unfit` if a setting names an unknown tracker; at run time it is only logged, job after job."""
    known = SINKS.names()
    for variable, names in (("SPARD_SINKS", settings.sinks), ("SPARD_INTEGRATIONS", settings.integrations)):
        if unknown := [name for name in names or () if name not in known]:
            raise Unfit(f"{variable} names {unknown[0]!r}: it should be one of {', '.join(known)}.")


class Sinks:
    """The sinks of one attempt: the provider's own, and the customer's integrations that the provider allows."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = list(feeds)
        self._status: Status = "interrupted"

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send a step's metrics, named as in the metrics file; None values are left out."""
        known = {name: value for name, value in rename_metrics(metrics).items() if value is not None}
        self._tell({"step": step, "metrics": known})

    def audit(self, report: Mapping[str, Any]) -> None:
        """Send the rates of a safety report, for base model and adapter, and the gate's decision."""
        figures = {
            f"safety/{name}/{who}": report[name][who]
            for name in _FIGURES
            for who in ("base", "adapter")
            if report.get(name, {}).get(who) is not None
        }
        self._tell({"audit": figures, "gate": report["gate"]["decision"]})

    def hear_end(self, report: Path, last_word: Mapping[str, Any] | None) -> None:
        """Note how the child ended, from its last message; if it is done, send the rates of its safety report."""
        match last_word:
            case {"kind": "done"} if self._feeds:
                with suppress(OSError, ValueError, KeyError, TypeError):  # publishing the report will raise the error
                    self.audit(json.loads(report.read_text()))
                self._status = "finished"
            case {"kind": "failed", "retryable": False}:
                self._status = "failed"

    def close(self) -> None:
        """End all sinks; they get some time to take the lines that are still queued, but nobody waits for them."""
        for feed in self._feeds:
            feed.close(self._status)

    def _tell(self, line: Line) -> None:
        for feed in self._feeds:
            feed.tell(line)


class Feed:
    """One sink's process and the thread that writes to it, started by the first line.

    `timeout_s` is how long the process may run after `close`; `command` replaces the default command in tests.
    """

    def __init__(self, name: str, facts: RunFacts, timeout_s: float, command: Sequence[str] | None = None) -> None:
        self._name, self._facts, self._timeout_s = name, facts, timeout_s
        self._command = command or python("worker.sinks", name, str(os.getpid()))
        self._lines: Queue[Line | None] = Queue(_QUEUED)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = structlog.get_logger(__name__).bind(sink=name, job_id=facts.id)
        self.thread = Thread(target=self._run, daemon=True)
        self._is_over = False

    def tell(self, line: Line) -> None:
        """Queue a line for the sink; drop it if the queue is full or the sink has ended."""
        if self._is_over:
            return
        if not self.thread.ident:
            self.thread.start()
        self._put(line)

    def close(self, status: Status) -> None:
        """Queue the end of the run, and kill the process if it still runs `timeout_s` later."""
        if self._is_over or not self.thread.ident:
            return
        self.tell({"end": status})
        while not self._put(None):
            with suppress(Empty):  # the queue is full: drop the oldest line, so that the end gets through
                self._lines.get_nowait()
        timer = Timer(self._timeout_s, self._kill)
        timer.daemon = True
        timer.start()

    def _put(self, line: Line | None) -> bool:
        try:
            self._lines.put_nowait(line)
        except Full:
            return False
        return True

    def _run(self) -> None:
        try:
            error = self._feed()
        except Exception as found:  # the job does not depend on it
            error = f"{type(found).__name__}: {found}"
        self._is_over = True
        if error:
            self._log.warning("a metric sink did not take everything", error=error)

    def _feed(self) -> str:
        """Start the process and write lines until the end; return the error text, or "" if there was none."""
        self._process = process = subprocess.Popen(  # noqa: S603 - the command is ours
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            start_new_session=True,
        )
        stdin, stdout = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        with stdout:
            with suppress(BrokenPipeError):
                _write(stdin, asdict(self._facts))
                while (line := self._lines.get()) is not None:
                    _write(stdin, line)
            with suppress(BrokenPipeError):
                stdin.close()
            said = stdout.read(1000).decode(errors="replace")
        return said or (f"exit status {code}" if (code := process.wait()) else "")

    def _kill(self) -> None:
        if self._process and self._process.poll() is None:
            self._log.warning("a metric sink is ended: it takes too long")
            self._process.kill()


def open_sinks(job: Job, settings: Settings) -> Sinks:
    """Return the sinks of a job; none, unless the provider has turned some on."""
    wanted = list(_wanted_sinks(job, settings))
    if wanted:
        with suppress(OSError):  # a sink that needs the folder will report it
            settings.sinks_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    return Sinks([Feed(name, facts, settings.sink_timeout_s) for name, facts in wanted])


def environment() -> dict[str, str]:
    """Return a sink's environment: the trackers' variables, paths, locale, proxies and certificates."""
    return safe_path(
        {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    )


def _wanted_sinks(job: Job, settings: Settings) -> Iterator[tuple[str, RunFacts]]:
    for name in settings.sinks or ():
        yield name, _facts(job, settings, None)
    for asked in job.spec.integrations:
        if asked.type in (settings.integrations or ()):
            yield asked.type, _facts(job, settings, asked)


def _facts(job: Job, settings: Settings, asked: IntegrationRef | None) -> RunFacts:
    recipe: Mapping[str, Any] = job.recipe
    params = {"model": job.model, "seed": recipe["seed"], "defense": recipe["defense"]["type"]}
    params |= recipe["hyperparameters"] | ({"beta": recipe["dpo"]["beta"]} if recipe.get("dpo") else {})
    return RunFacts(
        id=job.id,
        name=(asked and asked.name) or job.suffix or job.id,
        folder=str(settings.sinks_dir()),
        params=params,
        project=(asked and asked.project) or PROJECT,
        entity=asked.entity if asked else None,
        tags=asked.tags if asked else (),
    )


def _write(stdin: IO[bytes], line: Line) -> None:
    stdin.write(json.dumps(line).encode() + b"\n")
    stdin.flush()
