"""Outages and sick workers: no job is lost, none is told that it was its own fault. Minutes in the soak, seconds else.

Workers are processes of their own on PostgreSQL; their children are scripted, so that training takes no time. What the
soak needs of the system (mounts, as root) and does not get is skipped.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import func, select

from app.db import read
from app.db.tables import Job, JobEvent, JobMetric, JobStatus
from spard.config import JudgeSpec
from tests.faults import invariants
from tests.faults.conftest import Record
from tests.faults.proxy import proxy
from tests.faults.storm import is_soak
from tests.faults.test_network import UNAVAILABLE
from tests.judge_server import judge_server
from tests.narrowing import require
from tests.place import Place
from tests.worker.scripted_child import LONG, STEPS
from tests.worker.shop import Shop, wait_until

SERVE = "tests.worker.serve"
AWAY_S = 600.0 if is_soak() else 3.0
JOBS = 50 if is_soak() else 4
TRAINED = 5 if is_soak() else 2
LOSSES = 20 if is_soak() else 3
TIMERS = {"outage_patience_s": AWAY_S / 4, "gpu_probe_s": 5.0}
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start workers; none of them outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(shop: Shop, behavior: str, under: Sequence[str] = (), **changes: Any) -> subprocess.Popen[bytes]:
        started.append(shop.start(SERVE, behavior, under=under, **TIMERS | changes))
        return started[-1]

    yield begin
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait()


def check(shop: Shop, accepted: Sequence[str], record_property: Record) -> list[Job]:
    """All jobs succeeded, nobody was accused, and what always holds does."""
    jobs = [shop.job(job_id) for job_id in accepted]
    with read(shop.engine) as session:
        told = session.scalars(select(JobEvent.message).where(JobEvent.message.contains("moved back"))).all()
        errors = session.scalars(select(JobEvent.message).where(JobEvent.level == "error")).all()
    invariants.check(shop, accepted)
    record_property("jobs, succeeded, given back", (len(jobs), _count_succeeded(jobs), len(told)))
    assert (_count_succeeded(jobs), [job.error for job in jobs if job.error], errors) == (len(accepted), [], [])
    return jobs


def _count_succeeded(jobs: Sequence[Job]) -> int:
    return sum(job.status == JobStatus.succeeded for job in jobs)


def test_a_storage_that_is_away_fails_no_job(
    shop: Shop, moto_place: Place, model: Path, tmp_path: Path, start: Start, record_property: Record
) -> None:
    away = Event()
    refused: list[bytes] = []

    def plan(request: bytes) -> bytes | None:
        if away.is_set():
            refused.append(request[:1])
        return UNAVAILABLE if away.is_set() else None

    with proxy(moto_place.endpoint_url or "", plan) as (_, url):
        cloud = Shop(tmp_path / "cloud", shop.database_url, Place(moto_place.url, url), model)
        accepted = [cloud.add_job() for _ in range(JOBS)]
        start(cloud, "good")
        start(cloud, "good")
        wait_until(lambda: any(cloud.job(job_id).status == JobStatus.succeeded for job_id in accepted))
        away.set()
        time.sleep(AWAY_S)  # the outage
        wait_until(lambda: bool(refused))
        away.clear()
        for job_id in accepted:
            cloud.until_ended(job_id)
        jobs = check(cloud, accepted, record_property)
        cloud.engine.dispose()
    assert {job.attempt for job in jobs} == {1}
    record_property("seconds away, requests refused", (AWAY_S, len(refused)))


def test_a_judge_that_is_throttled_after_the_training_costs_no_training(
    shop: Shop, start: Start, record_property: Record
) -> None:
    with judge_server() as server:
        judge = JudgeSpec("llm", server.url, "grader", retries=0, canaries=0)
        began: list[float] = []

        def answer(body: dict[str, Any]) -> tuple[int, str]:
            began.append(time.monotonic())
            return (429, "") if began[-1] - began[0] < AWAY_S else (200, "#thescore: 1")

        server.answer = answer
        spec = replace(shop.job_columns()["spec"], judge="llm", judge_spec=judge)
        accepted = [shop.add_job(spec=spec) for _ in range(TRAINED)]
        start(shop, "judged")
        start(shop, "judged")
        for job_id in accepted:
            shop.until_ended(job_id)
        jobs = check(shop, accepted, record_property)
    assert {job.attempt for job in jobs} == {1}
    for job_id in accepted:
        steps = [each.split("/")[0] for each in shop.events(job_id) if each.startswith("Step ")]
        assert steps == [f"Step {i}" for i in range(1, STEPS + 1)]
    record_property("seconds throttled, requests", (AWAY_S, len(began)))


def test_a_long_job_that_is_lost_again_and_again_ends(shop: Shop, start: Start, record_property: Record) -> None:
    job_id, came_to = shop.add_job(), 0

    def has_come_further() -> bool:
        record = shop.job(job_id).checkpoint
        return record is not None and (record["step"] or 0) > came_to

    for _ in range(LOSSES):
        worker = start(shop, "long")
        wait_until(has_come_further)
        worker.kill()
        worker.wait()
        came_to = require(require(shop.job(job_id).checkpoint)["step"])
        shop.expire_lease(job_id)
    start(shop, "long")
    shop.until_ended(job_id)
    (job,) = check(shop, [job_id], record_property)
    with read(shop.engine) as session:
        steps = session.scalar(select(func.count()).where(JobMetric.job_id == job_id))
    assert (job.attempt >= LOSSES, steps) == (True, LONG)
    record_property("hard losses, furthest step", (LOSSES, came_to))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 96 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mount_disk(folder, "size=96m"):
        yield folder


@contextmanager
def mount_disk(folder: Path, options: str) -> Iterator[None]:
    """An empty disk at a folder; skipped where nobody may mount one."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("a disk can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


def test_a_worker_whose_disk_fills_takes_no_job_from_a_healthy_one(
    shop: Shop, small_disk: Path, start: Start, record_property: Record
) -> None:
    start(shop, "good", data_dir=small_disk)
    first = shop.add_job()
    shop.until_ended(first)  # it works, and is the only one
    fill(small_disk / "filler")
    accepted = [first, *[shop.add_job() for _ in range(10)]]
    wait_until(lambda: any(shop.job(job_id).waits for job_id in accepted))  # it has tried one
    start(shop, "good")
    for job_id in accepted:
        shop.until_ended(job_id)
    jobs = check(shop, accepted, record_property)
    assert {job.attempt for job in jobs} == {1}
    (small_disk / "filler").unlink()
    wait_until(lambda: not list(small_disk.glob("work/*/")))


def test_a_worker_without_models_takes_no_job_from_a_healthy_one(
    shop: Shop, model: Path, tmp_path: Path, start: Start, record_property: Record
) -> None:
    apart = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{model.parent}" && exec "$@"', "sh"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a disk can be mounted by root only")
    accepted = [shop.add_job() for _ in range(10)]
    start(shop, "good", under=apart, data_dir=tmp_path / "bare")
    wait_until(lambda: any(shop.job(job_id).waits for job_id in accepted))  # it has tried one
    start(shop, "good")
    for job_id in accepted:
        shop.until_ended(job_id)
    jobs = check(shop, accepted, record_property)
    assert {job.attempt for job in jobs} == {1}
    assert sum("does not have the base model" in each for job_id in accepted for each in shop.events(job_id)) == 1
