"""Jobs, workers, and one fault after the other, chosen by a seed; then the guards' counts and the invariants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from random import Random
from secrets import randbits

from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from app import quotas
from app.db import read, transaction
from app.db.tables import TERMINAL, Job, JobStatus
from app.errors import InvalidState
from app.jobs import service as jobs
from app.quotas import QuotaSet
from tests.faults import customer, invariants, sleeper
from tests.faults.processes import context
from tests.worker.shop import Shop

WORKERS, CUSTOMERS, END_S = 4, 3, 600.0
MAX_UNFINISHED = 8  # the project's limit, which its customers always want to pass
PATIENCE = 5  # times as many faults, until all guards have fired
TIMERS = {"lease_s": 0.6, "heartbeat_s": 0.1, "poll_s": 0.05, "reap_s": 0.1, "stop_grace_s": 2.0}
CALM = TIMERS | {"lease_s": 120.0}  # no worker is taken for lost, however busy the machine is
KINDS = ("kill", "kill as it publishes", "freeze", "stop", "cancel", "pause", "cut", "power", "kill a customer")
WEIGHTS = (6, 3, 8, 2, 2, 2, 2, 0.3, 2)
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
        self._folder = shop.folder.parent
        self._guards = self._folder / "guards"
        self._asked = shop.job_columns() | {"max_attempts": 1000}
        self._workers: list[BaseProcess] = []
        self._customers: list[BaseProcess] = []
        self._wake_at: list[tuple[float, int]] = []

    def run(self, faults: int, needed: Mapping[str, int] | None = None) -> dict[str, int]:
        """Inject `faults`, more while a guard has fired less often than needed; then all ends, and is checked."""
        injected = 0
        try:
            self._begin()
            while injected < faults or (injected < PATIENCE * faults and not self._have_fired(needed or {})):
                injected += 1
                time.sleep(self._rng.uniform(0.01, 0.15))
                self._wake(time.monotonic())
                for i in [i for i, worker in enumerate(self._workers) if not worker.is_alive()]:
                    self._replace(i)
                self._inject(self._rng.choices(KINDS, WEIGHTS)[0])
            self._end_faults()
        finally:
            self._end()
        accepted, counts = customer.accepted_jobs(self._folder), sleeper.counts(self._guards)
        invariants.check(self._shop, accepted)
        if counts.get(sleeper.ZOMBIE_ACCEPTED):
            raise invariants.Broken(f"{counts[sleeper.ZOMBIE_ACCEPTED]} writes of zombies were accepted")
        return counts | {"jobs": len(accepted), "faults": injected}

    def _begin(self) -> None:
        with transaction(self._shop.engine) as session:
            limit = QuotaSet(max_unfinished_jobs=MAX_UNFINISHED)
            quotas.set_quota(session, self._shop.key.project_id, limit)
        self._workers = [self._start() for _ in range(WORKERS)]
        self._customers = [self._start_customer() for _ in range(CUSTOMERS)]

    def _have_fired(self, needed: Mapping[str, int]) -> bool:
        counts = sleeper.counts(self._guards)
        return all(counts.get(name, 0) >= times for name, times in needed.items())

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
            case "kill a customer":
                self._customers.append(self._start_customer())
                self._bury(self._customers.pop(0), signal.SIGKILL)

    def _ask(self, kind: str) -> None:
        """Cancel a job of late, or pause it and let those go on that were paused before."""
        recent, project_id = customer.accepted_jobs(self._folder)[-MAX_UNFINISHED:], self._shop.key.project_id
        if kind == "pause":
            self._resume_paused()
        if recent:
            with suppress(DBAPIError, InvalidState), transaction(self._shop.engine) as session:
                (jobs.cancel if kind == "cancel" else jobs.pause)(session, project_id, self._rng.choice(recent))

    def _resume_paused(self) -> None:
        with suppress(DBAPIError), transaction(self._shop.engine) as session:
            for job_id in session.scalars(select(Job.id).where(Job.status == JobStatus.paused)).all():
                jobs.resume(session, self._shop.key.project_id, job_id)

    def _cut(self) -> None:
        """End every connection to the database; one that was within a COMMIT does not know how it went."""
        if self._shop.engine.dialect.name == "postgresql":
            with transaction(self._shop.engine) as session:
                session.execute(text(_TERMINATE))

    def _end_faults(self) -> None:
        """No more faults: nobody asks for more, what is frozen wakes up, what is paused goes on, and all ends."""
        sleeper.spare(self._guards)
        while self._customers:
            self._bury(self._customers.pop(), signal.SIGKILL)
        self._workers = [worker if worker.is_alive() else self._start() for worker in self._workers]
        deadline, is_open = time.monotonic() + END_S, Job.status.not_in(TERMINAL)
        while time.monotonic() < deadline:
            self._wake(float("inf"))
            self._resume_paused()
            with read(self._shop.engine) as session:
                if session.scalar(select(Job.id).where(is_open).limit(1)) is None:
                    return
            time.sleep(0.1)

    def _start(self) -> BaseProcess:
        values = self._shop.settings(**TIMERS).model_dump()
        process = self._context.Process(target=sleeper.serve, args=(values, self._guards, self._mutant))
        process.start()
        return process

    def _start_customer(self) -> BaseProcess:
        url, seed = self._shop.database_url, self._rng.randrange(2**32)
        values = (url, self._asked, self._folder, self._mutant, seed)
        process = self._context.Process(target=customer.serve, args=values)
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

    def _bury(self, process: BaseProcess, number: signal.Signals = signal.SIGCONT) -> None:
        self._wake_at = [each for each in self._wake_at if each[1] != process.pid]
        self._send(process, number)
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()

    def _end(self) -> None:
        for worker in self._workers:
            self._send(worker, signal.SIGTERM)
        for worker in self._workers:
            self._bury(worker)
        for each in self._customers:
            self._bury(each, signal.SIGKILL)
