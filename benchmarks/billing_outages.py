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
from app.ops.processes import die_with_parent
from app.storage.local import LocalStorage
from spard.config import JudgeSpec
from spard.config.patience import Patience
from spard.evaluation.judges import open_judge, use_chat
from spard.evaluation.judges.patient import PatientJudge
from tests.judge_server import judge_server
from tests.place import Place
from tests.spard.parts import write_model
from tests.worker import scripted_child
from tests.worker.shop import Shop, at_work
from worker.judge_client import Asking
from worker.judge_proxy import llm_judges
from worker.process import Child
from worker.protocol import Report
from worker.workdir import Folder, read_assignment
from worker.worker import Worker

STEPS, STEP_S = 60, 0.1  # of a job: what it computes is a sleep
OUTAGE_S = (3.0, 8.0)
COMPUTED = "computed"
_CHILD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from benchmarks.billing_outages import compute
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


def compute(parent: int) -> None:
    """Run a fake job that sleeps instead of training and asks its judge for verdicts; report how long it waited.

    The child process that `measure` starts calls this; `parent` is the worker's process id.
    """
    die_with_parent(parent)
    report = Report(sys.stdout.fileno())
    folder = Folder(Path(sys.stdin.readline().strip()))
    away = [0.0]
    report.stage("train")
    for step in range(1, STEPS + 1):
        time.sleep(STEP_S)
        report.metrics(step, STEPS, {"loss/task": 1 / step, "accuracy/task": 0.5})
        if step % 10 == 0:
            scripted_child.save(folder, report, step)
    report.stage("audit")
    _ask(folder, report, away)
    report.event(COMPUTED, {"ended_at": time.time(), "away_s": away[0]})
    scripted_child.finish(folder, report, "good")


def _ask(folder: Folder, report: Report, away: list[float]) -> None:
    assignment, since = read_assignment(folder), [0.0]
    asking = Asking(report, sys.stdin.fileno(), llm_judges(assignment.run.judge))

    def wait(seconds: float) -> None:
        report.waiting("judge")
        time.sleep(seconds)

    def note(lost_s: float | None) -> None:
        now = time.monotonic()
        since[0] = since[0] or now - (lost_s or 0.0)
        if lost_s is None:
            away[0], since[0] = away[0] + now - since[0], 0.0
        report.outage("judge", lost_s)

    with use_chat(asking.open):
        judge = PatientJudge(open_judge(assignment.run.judge), Patience(600.0, 0.2, 1.0), wait, note)
        for _ in range(20):
            time.sleep(STEP_S)
            judge.judge(["Hurt."], ["This is a reply."])
