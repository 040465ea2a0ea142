"""Jobs of a whole service, and one fault after the other, dealt by a seed; then all ends, and everything is checked.

Workers, their training processes and the API are processes of their own; the training alone is scripted.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from random import Random
from threading import Timer

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.exc import DBAPIError

from app import objects, retention
from app.db import read, transaction
from app.db.tables import TERMINAL, Job, JobEvent, JobStatus
from app.jobs.events import LEASE_EXPIRED
from app.objects import reconciler
from app.ops.broker import wake
from tests.faults import invariants
from tests.faults.deployment import Deployment
from tests.faults.http_customer import HttpCustomer, leave
from tests.worker.shop import Shop, forget_waits, submit, wait_until
from worker.attempt import as_clause
from worker.failures import FAULTS, KILLED, MACHINE_OUT_OF_MEMORY, outer_failure

LEASE_S = 2.0
FROZEN_S = 600 / 90 * LEASE_S  # ten minutes at the default lease
TIMERS = {
    "lease_s": LEASE_S,
    "heartbeat_s": LEASE_S * 15 / 90,
    "poll_s": 0.5,
    "reap_s": 0.3,
    "stop_grace_s": 20.0,
    "killed_wait_s": 0.5,
    "gpu_probe_s": 0.5,
    "outage_patience_s": 1.5,
    "storage_notice_s": 0.3,
}
CALM_S = 120.0  # the lease once no faults follow: no worker is taken for lost, however busy the machine is
AT_ONCE = 8  # jobs that have not ended
PATIENCE = 4  # times as many faults, until something was rescued
NOT_THE_JOB_S = frozenset(
    {LEASE_EXPIRED, "the worker stops"} | {as_clause(each) for each in (KILLED, MACHINE_OUT_OF_MEMORY)}
    | {as_clause(outer_failure(code)) for code in FAULTS} | {outer_failure(code).message for code in FAULTS}
)  # fmt: skip
_AT_ONCE_NOW = timedelta(seconds=-5)  # as if the time had passed
Fault = Callable[[], object]


class ServiceStorm:
    """Faults of one deployment; each is a method, or is given to `run`."""

    def __init__(self, shop: Shop, site: Deployment, customer: HttpCustomer, seed: int, streams: int) -> None:
        self.shop, self.site, self.rng, self.customer = shop, site, Random(seed), customer
        self.accepted: list[str] = []
        self.injected, self.seen = Counter[str](), Counter[str]()
        self._asked = shop.job_columns() | {"max_attempts": 1000}
        self._streams, self._due = streams, list[tuple[float, Fault]]()

    def common_faults(self) -> dict[str, Fault]:
        """Return the faults that every kind of deployment has."""
        return {
            "worker killed": self._kill,
            "training process killed": self._kill_child,
            "worker frozen and continued": self._freeze,
            "API killed in an upload": self._kill_api,
            f"{self._streams} streams opened and left": self._leave_streams,
        }

    def run(self, jobs: int, faults: Mapping[str, Fault], rounds: int) -> None:
        """Inject each fault `rounds` times among so many jobs, more while no job was rescued."""
        planned, deck, dealt = rounds * len(faults), list[str](), 0
        with self.site.running():
            while dealt < planned or (not self.seen["jobs rescued"] and dealt < PATIENCE * planned):
                self._submit(max(jobs * (dealt + 1) // planned, 1))
                wait_until(self._has_work)
                self._wait(self.rng.uniform(0.1, 1.0))
                deck = deck or self.rng.sample(sorted(faults), len(faults))
                kind = deck.pop()
                faults[kind]()
                self.injected[kind] += 1
                dealt += 1
            while len(self.accepted) < jobs:  # those that found no place before
                self._submit(jobs)
                self._wait(0.1)
            self._end_faults()
            self._check_api()
        self._check()

    def run_storm(self, is_so: Callable[[], bool]) -> None:
        """Let the storm go on until something has happened."""

        def look() -> bool:
            self._look()
            return is_so()

        wait_until(look)

    def later(self, seconds: float, do: Fault) -> None:
        """Do something once the storm has gone on for so long, or calms down."""
        self._due.append((time.monotonic() + seconds, do))

    def _submit(self, most: int) -> None:
        """Add jobs up to a number; of those, some have not ended."""
        while len(self.accepted) < most and self._count(Job.status.not_in(TERMINAL)) < AT_ONCE:
            if not self.add_job():
                break

    def add_job(self) -> bool:
        """Send a job, as the API does: with a message for a worker. False if the database takes none at the moment."""
        try:
            with transaction(self.shop.engine) as session:
                job_id = submit(session, self._asked)
                wake(session, job_id)
        except DBAPIError:
            return False
        self.accepted.append(job_id)
        return True

    def _count(self, which: ColumnElement[bool]) -> int:
        with read(self.shop.engine) as session:
            return session.scalar(select(func.count()).select_from(Job).where(which)) or 0

    def _has_work(self) -> bool:
        """Whether some worker that is not frozen works; a new job is sent where all have ended."""
        self._look()
        if not self._count(Job.status.not_in(TERMINAL)):
            self.add_job()
        return bool(self.site.busy())

    def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._look()
            time.sleep(0.05)

    def _look(self, now: float | None = None) -> None:
        """Start what has ended, do what is due, let jobs forget minutes of waiting, and read the metrics."""
        now = time.monotonic() if now is None else now
        for each in [each for each in self._due if each[0] <= now]:
            self._due.remove(each)
            each[1]()
        self.site.revive()
        with suppress(DBAPIError):
            forget_waits(self.shop)
        self.seen["jobs rescued"] = self.site.count_rescued()

    def _victim(self) -> int:
        wait_until(self._has_work)
        busy = self.site.busy()
        return self.rng.choice(busy) if busy else self._victim()

    def _kill(self) -> None:
        self.site.kill(self._victim())

    def _kill_child(self) -> None:
        self.seen["training processes killed"] += self.site.kill_child(self._victim())

    def _freeze(self) -> None:
        while len(self.site.frozen) >= self.site.size - 1:  # somebody has to work
            self._wait(0.1)
        pid = self._victim()
        self.site.freeze(pid, whole=self.rng.random() < 0.5)
        # In a thread of its own: one that is frozen within a transaction on SQLite keeps us waiting too.
        Timer(FROZEN_S, self.site.thaw, [pid]).start()

    def _kill_api(self) -> None:
        with self.customer.half_an_upload():
            time.sleep(self.rng.uniform(0.0, 0.3))
            self.site.kill_api()
        self.send_file()

    def send_file(self) -> None:
        """Send a whole file once, and count the answer."""
        self.seen[f"uploads answered {self.customer.upload()}"] += 1

    def _leave_streams(self) -> None:
        opened = self.customer.open_streams(self.rng.choice(self.accepted), self._streams)
        time.sleep(self.rng.uniform(0.0, 0.3))
        leave(opened)
        self.seen["streams left"] += len(opened)

    def _end_faults(self) -> None:
        """No more faults follow, and all ends."""
        self._look(float("inf"))
        self.seen["jobs rescued"] = self.site.count_rescued()
        self.site.restart_workers(lease_s=CALM_S, heartbeat_s=1.0)
        self.run_storm(lambda: not self._count(Job.status.not_in(TERMINAL)))

    def _check_api(self) -> None:
        """The API answers, has the files that it said it has, and gives every place of a stream again.

        It has no other file but such as it refused because the database's answer to a COMMIT was lost.
        """
        wait_until(lambda: self.customer.upload() == 200)
        listed, known = self.customer.list_files(), self.customer.files
        others = {file_id: digest for file_id, digest in listed.items() if file_id not in known}
        assert listed == known | others, f"missing {known.keys() - listed.keys()}"
        assert set(others.values()) <= self.customer.refused
        job_id = self.accepted[0]
        wait_until(lambda: len(self._open_all(job_id)) == self._streams)
        with read(self.shop.engine) as session:
            query = select(JobEvent.job_id, func.count()).group_by(JobEvent.job_id)
            events = {row[0]: row[1] for row in session.execute(query)}
        for job_id in self.accepted:
            assert self.customer.read_stream(job_id) == list(range(1, events[job_id] + 1))

    def _open_all(self, job_id: str) -> list[socket.socket]:
        opened = self.customer.open_streams(job_id, self._streams)
        leave(opened)
        return opened

    def _check(self) -> None:
        """Every job has succeeded once, nobody was blamed, and rows and objects agree."""
        invariants.check(self.shop, self.accepted)
        with read(self.shop.engine) as session:
            jobs = session.scalars(select(Job)).all()
            told = session.scalars(select(JobEvent).where(JobEvent.level != "info")).all()
        assert {(job.status, job.error is None) for job in jobs} == {(JobStatus.succeeded, True)}
        reasons = Counter(str((event.data or {}).get("reason", event.message)) for event in told)
        blamed = [each for each in reasons if each not in NOT_THE_JOB_S and not _is_wait(each)]
        assert blamed == [], reasons
        self.seen |= Counter({f"told: {reason}": times for reason, times in reasons.items()})
        self.seen["attempts"] = sum(job.lease_token for job in jobs)
        begin = partial(transaction, self.shop.engine)
        retention.sweep_attempts(begin, stay=_AT_ONCE_NOW)
        for _ in range(20):
            objects.sweep(self.shop.storage, begin, writes_stay=_AT_ONCE_NOW)
        found = reconciler.check(self.shop.storage, begin, young=_AT_ONCE_NOW)
        assert found.intents == 0
        assert [each.storage_key for each in found.findings if not each.storage_key.startswith("inputs/")] == []


def _is_wait(message: str) -> bool:
    return message.startswith(("Waiting: ", "The job waits for the service's storage"))
