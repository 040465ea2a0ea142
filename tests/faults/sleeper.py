"""A worker as it is, but for the child: one that takes six short steps in a thread and leaves results.

It runs in a process that the harness kills, freezes and cuts off, with a reaper and a courier beside it. Refusals of
the guards are counted in a file, a line each, so that a killed process has told all it saw.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, cast

from sqlalchemy import Column, ColumnDefault

from app.db import make_engine, read, transaction
from app.db.base import utc_now
from app.db.tables import TERMINAL, File, Job, JobEvent, JobStatus
from app.jobs import lease
from app.jobs.lease import Claim, reap
from app.ops.lifecycle import until_told
from app.settings import Settings
from app.signing import signing_key
from app.storage import open_storage
from app.webhooks import delivery
from tests.faults import full_disk, mutants
from tests.worker import scripted_child
from worker.attempt import Attempt, Backend
from worker.process import Child
from worker.protocol import Message, Report, parse
from worker.workdir import Folder

STEPS, STEP_S = 6, 0.02
ZOMBIE_S = 1.0
ZOMBIE_ACCEPTED, DIED_PUBLISHED = "zombie accepted", "died as it published"


class Sleeper:
    """Speaks the protocol of a child process from a thread."""

    pid, exit_code = 0, 0

    def __init__(self) -> None:
        self.is_over = False
        self._messages: Queue[Message | None] = Queue()
        self._stopped = Event()

    def work(self, folder: Folder, **ids: str | None) -> None:
        Thread(target=self._work, args=(folder,), daemon=True).start()

    def receive(self, timeout_s: float) -> Message | None:
        try:
            message = self._messages.get(timeout=timeout_s)
        except Empty:
            return None
        self.is_over = message is None
        return message

    def terminate(self) -> None:
        self._stopped.set()

    def kill(self) -> None:
        self._stopped.set()
        self.is_over = True

    def _work(self, folder: Folder) -> None:
        out, into = os.pipe()
        report = Report(into)
        for step in range(scripted_child.last_step(folder) + 1, STEPS + 1):
            time.sleep(STEP_S)
            report.metrics(step, STEPS, {"loss/task": 1 / step})
            if step == 3 or self._stopped.is_set():
                scripted_child.save(folder, report, step)
            if self._stopped.is_set():
                report.report_failed("stopped", "The worker stops.", None, retryable=True)
                break
        else:
            scripted_child.finish(folder, report, "pass")
        os.close(into)
        with os.fdopen(out, "rb") as lines:
            for line in lines:
                self._messages.put(parse(line))
        self._messages.put(None)


def serve(values: dict[str, Any], guards: Path, mutant: str | None, clock_s: float = 0.0) -> None:
    """Take jobs, and hand back those of others, until a signal comes; `time.time` is `clock_s` ahead."""
    mutants.apply(mutant)
    _set_clock(clock_s)
    full_disk.fill(guards.with_name("full"))
    os.setsid()
    settings, stop = Settings(**values), Event()
    for name in ("heartbeat", "holds"):
        setattr(lease, name, _count_refusals(name, getattr(lease, name), guards))
    backend = Backend(
        settings, make_engine(settings.database()), open_storage(settings.storage()), signing_key(settings)
    )
    Thread(target=_reap, args=(backend, guards), daemon=True).start()
    Thread(target=_deliver, args=(backend,), daemon=True).start()
    until_told(partial(_serve, backend, stop, guards), stop.set)


def _serve(backend: Backend, stop: Event, guards: Path) -> None:
    settings = backend.settings
    while not stop.is_set():
        try:
            with transaction(backend.engine) as session:
                claim = lease.claim(session, str(os.getpid()), settings.lease_s, settings.max_run_s)
            if claim is None:
                time.sleep(settings.poll_s)
                continue
            Attempt(backend, claim, lambda folder: cast(Child, Sleeper()), stop).run()
            _die_if_doomed(backend, claim, guards)
            _write_as_zombie(backend, claim, guards)
        except Exception as error:  # a worker lives on
            note(guards, f"error {type(error).__name__}")
            time.sleep(settings.poll_s)


def doom(guards: Path, pid: int) -> None:
    """The process `pid` dies in the instant after its next publication."""
    _doomed_path(guards).mkdir(exist_ok=True)
    (_doomed_path(guards) / str(pid)).touch()


def spare(guards: Path) -> None:
    """No doomed process dies any more."""
    shutil.rmtree(_doomed_path(guards), ignore_errors=True)


def _doomed_path(guards: Path) -> Path:
    return guards.with_name("doomed")


def _die_if_doomed(backend: Backend, claim: Claim, guards: Path) -> None:
    if not (_doomed_path(guards) / str(os.getpid())).exists():
        return
    with read(backend.engine) as session:
        job = session.get_one(Job, claim.job_id)
    if job.status == JobStatus.succeeded and job.lease_token == claim.token:
        note(guards, DIED_PUBLISHED)
        os.kill(os.getpid(), signal.SIGKILL)


def _write_as_zombie(backend: Backend, claim: Claim, guards: Path) -> None:
    """What was taken from us, or has ended, is not ours to write: we try."""
    deadline = time.monotonic() + ZOMBIE_S
    while True:  # until somebody else has it
        with read(backend.engine) as session:
            job = session.get_one(Job, claim.job_id)
        is_taken = job.lease_token > claim.token
        if is_taken or job.status in TERMINAL or time.monotonic() > deadline:
            break
        time.sleep(backend.settings.poll_s)
    if is_taken or job.status != JobStatus.running:
        with transaction(backend.engine) as session:
            written = lease.update(session, claim, phase="zombie")
        note(guards, ZOMBIE_ACCEPTED if written else "zombie refused" if is_taken else "late write refused")


def _set_clock(ahead_s: float) -> None:
    """What this process takes for the time of day, also for what it writes into rows."""
    right, right_now = time.time, utc_now
    time.time = lambda: right() + ahead_s
    for table in (JobEvent, File):
        column = cast(Column[datetime], table.__table__.c.created_at)
        column.default = ColumnDefault(lambda: right_now() + timedelta(seconds=ahead_s))
        column.default._set_parent(column)


def _reap(backend: Backend, guards: Path) -> None:
    while True:
        time.sleep(backend.settings.reap_s)
        try:
            with transaction(backend.engine) as session:
                for _ in reap(session):
                    note(guards, "reaped")
        except Exception as error:
            note(guards, f"error {type(error).__name__}")


def _deliver(backend: Backend) -> None:
    """What the process of an API does beside: bring events to their receivers, by timers for tests."""
    delivery._FIRST_WAIT_S, delivery._GROWTH, delivery._HELD_S, delivery._TOTAL_S = 0.1, 1.0, 2.0, 0.5
    delivery.Courier(backend.engine, allow_local=True).run(Event(), every_s=0.1)


def _count_refusals(name: str, write: Callable[..., Any], guards: Path) -> Callable[..., Any]:
    def write_and_note(*args: Any) -> Any:
        done = write(*args)
        if not done:
            note(guards, f"{name} refused")
        return done

    return write_and_note


def note(guards: Path, what: str) -> None:
    handle = os.open(guards, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(handle, f"{what}\n".encode())
    os.close(handle)


def counts(guards: Path) -> dict[str, int]:
    """How often each guard fired."""
    lines = guards.read_text().splitlines() if guards.exists() else []
    return {name: lines.count(name) for name in sorted(set(lines))}
