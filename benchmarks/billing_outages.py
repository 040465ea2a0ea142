"""Compare billed GPU seconds with computed ones over outages of storage and judge, for `benchmarks.billing`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread, current_thread
from typing import Any

from sqlalchemy import select

from app.db import read, upgrade_schema
from app.db.tables import JobEvent, JobStatus
from app.storage.local import LocalStorage
from benchmarks.billing_child import COMPUTED, STEP_S, STEPS
from spard.config import JudgeSpec
from tests.judge_server import judge_server
from tests.place import Place
from tests.spard.parts import write_model
from tests.worker.shop import Shop, at_work
from worker.process import Child
from worker.workdir import Folder
from worker.worker import Worker

OUTAGE_S = (3.0, 8.0)
_CHILD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from benchmarks.billing_child import compute
compute(int(sys.argv[-1]))
"""


class Outages:
    """Switches that make the storage hang or the judge unavailable."""

    def __init__(self) -> None:
        self.storage_back, self.is_judge_away = Event(), False
        self.storage_back.set()

    def occur(self, what: str, after_s: float, seconds: float) -> None:
        """Wait `after_s` seconds, then make `what` ("judge" or "storage") fail for `seconds` seconds."""
        time.sleep(after_s)
        if what == "judge":
            self.is_judge_away = True
        else:
            self.storage_back.clear()
        time.sleep(seconds)
        self.is_judge_away = False
        self.storage_back.set()


def measure(count: int, rng: random.Random) -> None:
    """Run `count` jobs with one outage each, and print their billed GPU seconds and those that they computed."""
    outages = Outages()
    billed_s = computed_s = away_s = 0.0
    begun = list[float]()
    with _hanging(outages), _noting_work(begun), TemporaryDirectory() as home, judge_server() as judge:
        judge.answer = lambda body: (503, "") if outages.is_judge_away else (200, "#thescore: 1")
        shop = _shop(Path(home))
        spec = JudgeSpec("llm", judge.url, "grader", retries=0, canaries=0)
        settings = shop.settings(judge=spec, gpu_probe_s=1.0, heartbeat_s=1.0, storage_notice_s=1.0)
        command = [sys.executable, "-c", _CHILD]
        with at_work(Worker(settings, command), "worker"):
            for i in range(count):
                what, seconds = ("storage", "judge")[i % 2], rng.uniform(*OUTAGE_S)
                after_s = rng.uniform(2.0, STEPS * STEP_S + 4.0)  # the child needs seconds to start
                job_id = shop.add_job(spec=replace(shop.job_columns()["spec"], judge="llm", judge_spec=spec))
                outage = Thread(target=outages.occur, args=(what, after_s, seconds))
                outage.start()
                job = shop.until_ended(job_id)
                outage.join()
                assert job.status == JobStatus.succeeded, job.error
                computed = _computed_s(shop, job_id, begun[-1])
                print(f"{what} away {seconds:.1f} s: computed {computed:.2f}, billed {job.gpu_seconds:.2f}", flush=True)
                billed_s, computed_s, away_s = billed_s + job.gpu_seconds, computed_s + computed, away_s + seconds
        shop.engine.dispose()
    share = billed_s / computed_s - 1
    print(f"{count} outages of {away_s:.0f} s: computed {computed_s:.1f} s, billed {billed_s:.1f} s ({share:+.2%})")


def _shop(home: Path) -> Shop:
    data = home / "data"
    data.mkdir()
    url = f"sqlite:///{home / 'spard.db'}"
    upgrade_schema(url)
    return Shop(data, url, Place(f"file://{home}/objects"), write_model(home / "tiny"))


def _computed_s(shop: Shop, job_id: str, began: float) -> float:
    """Return the seconds between `began` and the end of the computation, less those spent waiting for the judge."""
    with read(shop.engine) as session:
        query = select(JobEvent.data).where(JobEvent.job_id == job_id, JobEvent.message == COMPUTED)
        data: Any = session.scalars(query).one()
    return float(data["ended_at"]) - began - float(data["away_s"])


@contextmanager
def _noting_work(begun: list[float]) -> Iterator[None]:
    """Append the time at which each child process gets its job to `begun`."""
    work = Child.work

    def note_work(self: Child, folder: Folder, **ids: str | None) -> None:
        begun.append(time.time())
        work(self, folder, **ids)

    Child.work = note_work  # type: ignore[method-assign]
    try:
        yield
    finally:
        Child.work = work  # type: ignore[method-assign]


@contextmanager
def _hanging(outages: Outages) -> Iterator[None]:
    """Make the worker's writes to storage block during a storage outage."""
    write = LocalStorage.write

    def hanging(self: LocalStorage, key: str, content: Any) -> Any:
        if current_thread().name.startswith("worker"):
            outages.storage_back.wait()
        return write(self, key, content)

    LocalStorage.write = hanging  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LocalStorage.write = write  # type: ignore[method-assign]
