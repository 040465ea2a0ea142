"""Whose fault it is: storage and judge that are away, a worker without disk or models, and what that costs a job."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import pytest
from sqlalchemy import select, update

from app.db import read, transaction
from app.db.tables import Job, JobEvent, JobStatus
from app.jobs import transitions
from app.ops import preflight
from app.storage import StorageError
from app.storage.local import LocalStorage
from spard.config.patience import Patience
from tests.narrowing import require
from tests.worker.shop import Shop, at_work, forget_waits, scripted_command, wait_until
from worker import inputs
from worker.attempt import OutageWaiter
from worker.failures import ModelMissing
from worker.listener import Stopping
from worker.workdir import new_folder
from worker.worker import Worker

QUICK: dict[str, Any] = {"gpu_probe_s": 0.1, "outage_patience_s": 0.3}
PATIENT: dict[str, Any] = {"gpu_probe_s": 0.1, "outage_patience_s": 3600.0}
STORAGE = "he service's storage does not answer"


class Outage:
    """A storage that is away for workers while `is_on`, for the keys that hold `part`; it is there when they start."""

    def __init__(self) -> None:
        self.is_on, self.part, self.refused = False, "", 0

    def check(self, key: str) -> None:
        if self.is_on and self.part in key and current_thread().name in ("worker", "worker storage"):
            self.refused += 1
            raise StorageError("The storage does not answer: EndpointConnectionError.")


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    outage, write, chunks = Outage(), LocalStorage.write, LocalStorage.chunks

    def checked_write(self: LocalStorage, key: str, content: Any) -> Any:
        outage.check(key)
        return write(self, key, content)

    def checked_chunks(self: LocalStorage, key: str, *span: Any) -> Iterator[bytes]:
        outage.check(key)
        return chunks(self, key, *span)

    monkeypatch.setattr(LocalStorage, "write", checked_write)
    monkeypatch.setattr(LocalStorage, "chunks", checked_chunks)
    return outage


@contextmanager
def running(shop: Shop, behavior: str, name: str = "worker", **changes: Any) -> Iterator[Worker]:
    """A worker in a thread of that name."""
    with at_work(Worker(shop.settings(**changes), scripted_command(behavior)), name) as worker:
        yield worker


def tell(shop: Shop, job_id: str, text: str) -> bool:
    """Whether an event of the job holds a text."""
    return any(text in event for event in shop.events(job_id))


def test_an_outage_of_the_storage_fails_no_job_of_the_queue(light_shop: Shop, outage: Outage) -> None:
    jobs = [light_shop.add_job() for _ in range(5)]
    outage.is_on = True
    with running(light_shop, "good", **QUICK) as first, running(light_shop, "good", **QUICK) as second:
        wait_until(lambda: not (first.is_fit or second.is_fit))  # both have given a job back, and take no other
        refused = outage.refused
        wait_until(lambda: outage.refused >= refused + 4)  # looks at the storage, no downloads
        seen = [light_shop.job(job_id) for job_id in jobs]
        outage.is_on = False
        forget_waits(light_shop)
        ended = [light_shop.until_ended(job_id) for job_id in jobs]
        wait_until(lambda: first.is_fit and second.is_fit)
    assert {(job.status, job.attempt, job.error is None) for job in seen} == {(JobStatus.queued, 0, True)}
    assert sum(job.waits for job in seen) == 2
    assert {(job.status, job.attempt) for job in ended} == {(JobStatus.succeeded, 1)}
    waited = [job.id for job in seen if job.waits]
    for job_id in waited:
        assert tell(light_shop, job_id, f"Waiting: T{STORAGE}")
        assert tell(light_shop, job_id, f"moved back to the queue: t{STORAGE}")


def test_what_was_trained_is_uploaded_however_long_the_storage_was_away(shop: Shop, outage: Outage) -> None:
    job_id = shop.add_job()
    outage.is_on, outage.part = True, "/out/"
    with running(shop, "good", gpu_probe_s=0.1, outage_patience_s=0.0):
        wait_until(lambda: outage.refused > 20)
        assert shop.job(job_id).status == JobStatus.running
        outage.is_on = False
        job = shop.until_ended(job_id)
    assert (job.status, job.attempt, job.lease_token) == (JobStatus.succeeded, 1, 1)
    events = shop.events(job_id)
    assert [each.split("/")[0] for each in events if each.startswith("Step ")] == [f"Step {i}" for i in range(1, 7)]
    assert sum("Waiting:" in each for each in events) == 1


@pytest.mark.parametrize(
    ("ask", "status"),
    [(transitions.request_cancel, JobStatus.cancelled), (transitions.request_pause, JobStatus.paused)],
)
def test_a_job_that_waits_hears_its_owner(
    light_shop: Shop, outage: Outage, ask: Callable[..., Any], status: JobStatus
) -> None:
    job_id = light_shop.add_job()
    outage.is_on = True
    with running(light_shop, "good", **PATIENT):
        wait_until(lambda: tell(light_shop, job_id, "Waiting:"))
        with transaction(light_shop.engine) as session:
            ask(session, job_id)
        wait_until(lambda: light_shop.job(job_id).status == status)


def test_a_job_that_waits_ends_when_its_time_is_over(light_shop: Shop, outage: Outage) -> None:
    job_id = light_shop.add_job()
    outage.is_on = True
    with running(light_shop, "good", reap_s=3600.0, **PATIENT):
        wait_until(lambda: tell(light_shop, job_id, "Waiting:"))
        with transaction(light_shop.engine) as session:
            session.execute(update(Job).values(deadline_at=1.0))
        job = light_shop.until_ended(job_id)
    assert require(job.error)["code"] == "deadline_exceeded"


def test_a_checkpoint_that_the_storage_did_not_take_is_kept_later(light_shop: Shop, outage: Outage) -> None:
    outage.is_on, outage.part = True, "/checkpoints/"
    job_id = light_shop.add_job()
    with running(light_shop, "slow"):
        wait_until(light_shop.is_slow)
        wait_until(lambda: outage.refused > 0)
        outage.is_on = False
        with transaction(light_shop.engine) as session:
            transitions.request_pause(session, job_id)
        wait_until(lambda: light_shop.job(job_id).status == JobStatus.paused)
    assert require(light_shop.job(job_id).checkpoint)["step"] is not None


def test_what_was_kept_is_not_given_up_because_the_storage_is_away(light_shop: Shop, outage: Outage) -> None:
    job_id = light_shop.add_job()
    with light_shop.serving("slow") as worker:
        wait_until(light_shop.is_slow)
        worker.end()
    outage.is_on, outage.part = True, "/checkpoints/"
    with running(light_shop, "good", **PATIENT):
        wait_until(lambda: tell(light_shop, job_id, "Waiting:"))
        outage.is_on = False
        light_shop.until_ended(job_id)
    steps = [event.split("/")[0] for event in light_shop.events(job_id) if event.startswith("Step ")]
    assert steps == [f"Step {i}" for i in (1, 2, 3, 4, 5, 6)]


def test_a_judge_that_is_away_costs_no_attempt_and_never_passes(light_shop: Shop) -> None:
    job_id = light_shop.add_job()
    with running(light_shop, "judge_down", **QUICK):
        for times in (1, 2, 3, 4):
            wait_until(lambda: light_shop.job(job_id).waits == times)  # noqa: B023 - called in this turn
            forget_waits(light_shop)
    job = light_shop.job(job_id)
    assert (job.status, job.attempt, job.adapter, job.error) == (JobStatus.queued, 0, None, None)
    assert tell(light_shop, job_id, "moved back to the queue: the judge of the audit does not answer at the moment")
    forget_waits(light_shop)
    with light_shop.serving("good"):
        assert light_shop.until_ended(job_id).status == JobStatus.succeeded


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, light_shop: Shop) -> Path:
    """A data folder whose disk is full until the file `freed` lies beside it."""
    folder, usage, new = light_shop.folder.parent / "full", shutil.disk_usage, new_folder

    def is_full(path: Path) -> bool:
        return path.is_relative_to(folder) and not folder.with_name("freed").exists()

    def no_room(path: Path, name: str) -> Any:
        if is_full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return new(path, name)

    monkeypatch.setattr("worker.attempt.new_folder", no_room)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(path)._replace(free=0) if is_full(path) else usage(path)
    )
    return folder


def test_a_worker_with_a_full_disk_leaves_its_jobs_to_others(
    light_shop: Shop, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [light_shop.add_job() for _ in range(6)]
    monkeypatch.setattr(preflight, "_MIN_FREE_BYTES", 0)  # it fills up once the worker runs
    sick = Worker(light_shop.settings(data_dir=full_disk, **QUICK), scripted_command("good"))
    monkeypatch.setattr(preflight, "_MIN_FREE_BYTES", 1)
    with at_work(sick):
        wait_until(lambda: not sick.is_fit)
        given_back = [job for job in map(light_shop.job, jobs) if job.waits]
        forget_waits(light_shop)
        with running(light_shop, "good"):
            ended = [light_shop.until_ended(job_id) for job_id in jobs]
        full_disk.with_name("freed").touch()
        wait_until(lambda: sick.is_fit)
        assert light_shop.until_ended(light_shop.add_job()).status == JobStatus.succeeded
    assert len(given_back) == 1
    assert tell(light_shop, given_back[0].id, "moved back to the queue: the disk of a worker was full")
    assert {(job.status, job.attempt, job.error is None) for job in ended} == {(JobStatus.succeeded, 1, True)}


def test_a_disk_that_only_the_job_itself_fills_costs_an_attempt_elsewhere(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: Path, name: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job_id = light_shop.add_job()
    with monkeypatch.context() as patch:
        patch.setattr("worker.attempt.new_folder", no_room)
        with running(light_shop, "good", **QUICK):
            wait_until(lambda: light_shop.job(job_id).excluded_worker_id is not None)
    job = light_shop.job(job_id)
    assert (job.status, job.attempt, job.waits) == (JobStatus.queued, 1, 0)
    forget_waits(light_shop)
    with transaction(light_shop.engine) as session:
        session.execute(update(Job).values(excluded_worker_id="another worker"))
    with light_shop.serving("good"):
        assert light_shop.until_ended(job_id).status == JobStatus.succeeded


@pytest.fixture
def without_models(monkeypatch: pytest.MonkeyPatch) -> Event:
    """What is true for workers in threads of the name `bare`: no base model is mounted, until the event is set."""
    mounted, local = Event(), inputs._local_model

    def local_model(source: str, revision: str | None) -> str:
        if current_thread().name == "bare" and not mounted.is_set():
            raise ModelMissing("not mounted")
        return local(source, revision)

    monkeypatch.setattr(inputs, "_local_model", local_model)
    return mounted


def test_a_worker_without_the_base_model_leaves_its_jobs_to_others(light_shop: Shop, without_models: Event) -> None:
    jobs = [light_shop.add_job() for _ in range(6)]
    with running(light_shop, "good", "bare", **QUICK):
        wait_until(lambda: any(light_shop.job(job_id).waits for job_id in jobs))
        forget_waits(light_shop)
        with running(light_shop, "good"):
            ended = [light_shop.until_ended(job_id) for job_id in jobs]
    assert {(job.status, job.attempt, job.error is None) for job in ended} == {(JobStatus.succeeded, 1, True)}
    moved = [each for job_id in jobs for each in light_shop.events(job_id) if "moved back" in each]
    assert moved == ["Fine-tuning job moved back to the queue: a worker does not have the base model at the moment"]


def test_a_job_that_no_worker_has_the_model_for_waits_and_accuses_nobody(
    light_shop: Shop, without_models: Event, model: Path
) -> None:
    job_id = light_shop.add_job()
    with running(light_shop, "good", "bare", **QUICK):
        wait_until(lambda: light_shop.job(job_id).waits == 1)
        forget_waits(light_shop)
        assert light_shop.job(job_id).error is None
        without_models.set()
        os.utime(model / "config.json")  # the folder looks another way: it is tried again
        assert light_shop.until_ended(job_id).status == JobStatus.succeeded


def test_no_failure_of_others_is_told_as_the_customer_s(light_shop: Shop, outage: Outage) -> None:
    light_shop.add_job()
    outage.is_on = True
    with running(light_shop, "good", **QUICK) as worker:
        wait_until(lambda: not worker.is_fit)
    with read(light_shop.engine) as session:
        events = session.scalars(select(JobEvent)).all()
    assert {event.level for event in events} <= {"info", "warn"}
    assert not any(word in event.message for event in events for word in ("inputs/", "Endpoint", "your"))


class Clock:
    """Time that passes while somebody waits, and only then."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def waiting(clock: Clock, go_on: Callable[[], None] = lambda: None) -> tuple[OutageWaiter, list[str]]:
    """Waits that take no time, and the codes of what they were for."""
    ended, codes = Event(), list[str]()
    ended.wait = clock.wait  # type: ignore[method-assign, assignment]
    return OutageWaiter(1.0, 60.0, lambda what: codes.append(what.code), go_on, ended, clock), codes


def test_ten_minutes_without_storage_are_waited_for() -> None:
    clock = Clock()

    def download() -> str:
        if clock.now < 599:
            raise StorageError("away")
        return "whole"

    waits, codes = waiting(clock)
    assert waits.insist(download, 600.0) == "whole"
    assert set(codes) == {"storage_unavailable"}
    assert len(codes) == len(list(Patience(600.0).waits()))


def test_what_is_away_for_longer_is_given_up() -> None:
    def download() -> str:
        raise StorageError("away")

    clock = Clock()
    with pytest.raises(StorageError):
        waiting(clock)[0].insist(download, 600.0)
    assert clock.now == pytest.approx(600)


def test_what_is_not_the_surroundings_fault_is_not_waited_for() -> None:
    def download() -> str:
        raise inputs.Changed("other bytes")

    waits, codes = waiting(Clock())
    with pytest.raises(inputs.Changed):
        waits.insist(download, 600.0)
    assert codes == []


def test_a_stop_ends_the_wait_within_a_second() -> None:
    clock = Clock()

    def download() -> str:
        raise StorageError("away")

    def raise_when_late() -> None:
        if clock.now > 100:
            raise Stopping

    with pytest.raises(Stopping):
        waiting(clock, raise_when_late)[0].insist(download, 600.0)
    assert clock.now <= 101.1
