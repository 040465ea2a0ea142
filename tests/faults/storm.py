"""Jobs, workers, and one fault after the other, chosen by a seed; then the guards' counts and the invariants."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from random import Random
from secrets import randbits

from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from app.db import read, transaction
from app.jobs import lease
from app.models import TERMINAL, Job, JobStatus
from tests.faults import invariants, sleeper
from tests.faults.processes import context
from tests.worker.shop import Shop

WORKERS, END_S = 4, 120.0
TIMERS = {"lease_s": 0.6, "heartbeat_s": 0.1, "poll_s": 0.05, "reap_s": 0.1, "stop_grace_s": 2.0}
KINDS = ("kill", "kill as it publishes", "freeze", "stop", "cancel", "pause", "cut", "power")
WEIGHTS = (6, 3, 8, 2, 2, 2, 2, 0.3)
_TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def fault_seed() -> int:
    """FAULT_SEED from the environment, or a new one; whoever takes it shows it."""
    return int(os.environ.get("FAULT_SEED") or randbits(32))


def is_soak() -> bool:
    return os.environ.get("SPARD_SOAK") == "1"


class Storm:
    """Workers that are hurt while they work. `run` returns how often each guard fired."""

    def __init__(self, shop: Shop, seed: int, mutant: str | None = None) -> None:
        self._shop, self._rng, self._mutant = shop, Random(seed), mutant
        self._context = context()
        self._guards = shop.folder.parent / "guards"
        self._workers: list[BaseProcess] = []
        self._wake_at: list[tuple[float, int]] = []
        self._accepted: list[str] = []

    def run(self, faults: int) -> dict[str, int]:
        """Inject `faults`, let everything come to its end, and check the invariants."""
        try:
            self._workers = [self._start() for _ in range(WORKERS)]
            for _ in range(faults):
                self._keep_busy()
                time.sleep(self._rng.uniform(0.01, 0.15))
                self._wake(time.monotonic())
                for i in [i for i, worker in enumerate(self._workers) if not worker.is_alive()]:
                    self._replace(i)
                self._inject(self._rng.choices(KINDS, WEIGHTS)[0])
            self._calm_down()
        finally:
            self._end()
        invariants.check(self._shop, self._accepted)
        counts = sleeper.counts(self._guards)
        if counts.get(sleeper.ZOMBIE_ACCEPTED):
            raise invariants.Broken(f"{counts[sleeper.ZOMBIE_ACCEPTED]} writes of zombies were accepted")
        return counts | {"jobs": len(self._accepted), "faults": faults}

    def _inject(self, kind: str) -> None:
        i = self._rng.randrange(len(self._workers))
        match kind:
            case "kill" | "stop":
                self._send(self._workers[i], signal.SIGKILL if kind == "kill" else signal.SIGTERM)
                self._replace(i)
            case "kill as it publishes":
                sleeper.doom(self._guards, self._workers[i].pid or 0)
            case "freeze":
                self._send(self._workers[i], signal.SIGSTOP)
                self._wake_at.append((time.monotonic() + self._rng.choice((0.2, 1.0, 1.0)), self._workers[i].pid or 0))
            case "cancel" | "pause":
                self._ask(kind)
            case "cut":
                self._cut()
            case "power":
                for worker in self._workers:
                    self._send(worker, signal.SIGKILL)
                self._workers = [self._start() for _ in self._workers]

    def _ask(self, kind: str) -> None:
        job_id = self._rng.choice(self._accepted)
        with suppress(DBAPIError), transaction(self._shop.engine) as session:
            (lease.cancel if kind == "cancel" else lease.pause)(session, job_id)

    def _cut(self) -> None:
        """End every connection to the database; one that was within a COMMIT does not know how it went."""
        if self._shop.engine.dialect.name == "postgresql":
            with transaction(self._shop.engine) as session:
                session.execute(text(_TERMINATE))

    def _keep_busy(self) -> None:
        with read(self._shop.engine) as session:
            waiting = session.scalar(select(func.count()).where(Job.status == JobStatus.queued)) or 0
        if waiting < WORKERS:
            self._accepted += [self._shop.add_job(max_attempts=1000) for _ in range(WORKERS)]

    def _calm_down(self) -> None:
        """No more faults: what is frozen wakes up, what is paused goes on, and all ends."""
        sleeper.spare(self._guards)
        self._workers = [worker if worker.is_alive() else self._start() for worker in self._workers]
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            self._wake(float("inf"))
            with transaction(self._shop.engine) as session:
                left = session.execute(select(Job.id, Job.status).where(Job.status.not_in(TERMINAL))).all()
                for job_id, status in left:
                    if status == JobStatus.paused:
                        lease.resume(session, job_id)
            if not left:
                return
            time.sleep(0.1)

    def _start(self) -> BaseProcess:
        values = self._shop.settings(**TIMERS).model_dump()
        process = self._context.Process(target=sleeper.serve, args=(values, self._guards, self._mutant))
        process.start()
        return process

    def _replace(self, i: int) -> None:
        buried, self._workers[i] = self._workers[i], self._start()
        self._bury(buried)

    def _send(self, process: BaseProcess, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, number)

    def _wake(self, now: float) -> None:
        for at, pid in [each for each in self._wake_at if each[0] <= now]:
            self._wake_at.remove((at, pid))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _bury(self, process: BaseProcess) -> None:
        self._wake_at = [each for each in self._wake_at if each[1] != process.pid]
        self._send(process, signal.SIGCONT)
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()

    def _end(self) -> None:
        for worker in self._workers:
            self._send(worker, signal.SIGTERM)
        for worker in self._workers:
            self._bury(worker)
