"""Workers that are killed, frozen, stopped or cut off: each job ends once, and nothing outlives its worker."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event

import psutil
import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import DBAPIError

from app.db import make_engine, transaction
from app.db.tables import JobStatus
from app.errors import Unfit
from app.jobs import lease
from app.jobs.lease import Claim
from tests.narrowing import require
from tests.worker.shop import WAIT_S, Shop, wait_until
from worker.heartbeat import Heart
from worker.worker import Worker

SERVE = "tests.worker.serve"
DROP_ALL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(shop: Shop) -> Iterator[Start]:
    """Start whole workers; none of them outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(behavior: str) -> subprocess.Popen[bytes]:
        started.append(shop.start(SERVE, behavior))
        return started[-1]

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def slow_child(shop: Shop) -> psutil.Process:
    """The child that is at work, once it is."""
    wait_until(shop.is_slow)
    (found,) = (each for each in psutil.Process().children(recursive=True) if is_child(each))
    return found


def is_frozen_without_a_lock(shop: Shop, worker: subprocess.Popen[bytes], job_id: str) -> bool:
    """Stop a worker and let its lease expire; one that stopped within a transaction goes on, as it keeps its locks."""
    worker.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)
    try:
        shop.expire_lease(job_id)
    except DBAPIError:
        worker.send_signal(signal.SIGCONT)
        return False
    return True


def is_child(process: psutil.Process) -> bool:
    """Whether it is the scripted child itself, and not one that stands around it."""
    with suppress(psutil.Error):
        return process.cmdline()[1:3] == ["-m", "tests.worker.scripted_child"]
    return False


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more, whoever has to collect it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker, and wait until its children have followed: each holds the lock of the attempt's folder."""
    family = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    worker.wait()
    wait_until(lambda: all(map(has_ended, family)))


def terminal_events(shop: Shop, job_id: str) -> list[str]:
    return [event for event in shop.events(job_id) if event == "The job has successfully completed"]


def test_a_killed_worker_takes_its_child_along_and_another_finishes_the_job(shop: Shop, start: Start) -> None:
    job_id = shop.add_job()
    first = start("slow")
    slow_child(shop)
    kill(first)
    shop.expire_lease(job_id)
    with shop.serving("good"):
        job = shop.until_ended(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    assert any("lease_expired" in event for event in shop.events(job_id))


def test_a_frozen_worker_cannot_publish_when_it_wakes_up(shop: Shop, start: Start) -> None:
    job_id = shop.add_job()
    zombie = start("late")
    child = slow_child(shop)
    wait_until(lambda: is_frozen_without_a_lock(shop, zombie, job_id))
    with shop.serving("good"):
        shop.until_ended(job_id)
        child.terminate()  # the zombie's child finishes the job meanwhile, and tells so
        zombie.send_signal(signal.SIGCONT)
        wait_until(lambda: not child.is_running())
    job = shop.job(job_id)
    assert (job.lease_token, "/a2/" in require(job.adapter)["storage_key"]) == (2, True)
    assert len(terminal_events(shop, job_id)) == 1
    zombie.send_signal(signal.SIGTERM)
    assert zombie.wait(WAIT_S) == 0


def test_results_of_a_lost_lease_are_never_published(shop: Shop) -> None:
    job_id = shop.add_job()
    with shop.serving("late", lease_s=60.0, heartbeat_s=39.0) as worker:
        wait_until(lambda: any(event.startswith("Step 4/6") for event in shop.events(job_id)))
        with transaction(shop.engine) as session:
            lease.release(session, Claim(job_id, 1, 1), "taken away by the test")
        worker.end()  # it takes no other job; the child finishes this one
    job = shop.job(job_id)
    assert (job.status, job.adapter, job.fine_tuned_model) == (JobStatus.queued, None, None)
    assert shop.storage.exists(f"tenants/{job.project_id}/jobs/{job_id}/a1/out/adapter.tar.gz")


def test_a_worker_that_is_told_to_stop_checkpoints_and_hands_back_its_job(shop: Shop, start: Start) -> None:
    job_id = shop.add_job()
    worker = start("slow")
    slow_child(shop)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WAIT_S) == 0
    job = shop.job(job_id)
    assert (job.status, job.attempt, require(job.checkpoint)["step"]) == (JobStatus.queued, 0, 4)


def test_the_next_worker_goes_on_where_the_stopped_one_was(shop: Shop) -> None:
    job_id = shop.add_job()
    with shop.serving("slow") as worker:
        slow_child(shop)
        worker.end()
    with shop.serving("good"):
        job = shop.until_ended(job_id)
    steps = [event.split("/")[0] for event in shop.events(job_id) if event.startswith("Step ")]
    assert (job.status, steps) == (JobStatus.succeeded, [f"Step {i}" for i in (1, 2, 3, 4, 5, 6)])


def test_a_child_that_does_not_listen_is_killed_in_time(shop: Shop) -> None:
    job_id = shop.add_job()
    with shop.serving("deaf", stop_grace_s=1.0) as worker:
        slow_child(shop)
        worker.end()
    assert (shop.job(job_id).status, shop.job(job_id).attempt) == (JobStatus.queued, 0)


def test_an_idle_worker_leaves_at_once_with_its_spare_child(shop: Shop, start: Start) -> None:
    worker = shop.start(SERVE, "good", warm_child=True)
    found: list[psutil.Process] = []

    def has_spare() -> bool:  # what probes the machine's sandbox ends before it
        with suppress(psutil.NoSuchProcess):
            found[:] = [
                each for each in psutil.Process(worker.pid).children() if "scripted_child" in str(each.cmdline())
            ]
        return bool(found)

    wait_until(has_spare)
    (spare,) = found
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WAIT_S) == 0
    assert not spare.is_running()


def test_a_killed_worker_s_folder_is_removed_by_the_next(light_shop: Shop) -> None:
    light_shop.add_job()
    worker = light_shop.start(SERVE, "slow")
    slow_child(light_shop)
    kill(worker)
    assert list(light_shop.work_dir.glob("*/"))
    with light_shop.serving("good"):
        wait_until(lambda: not list(light_shop.work_dir.glob("*-a1")))


def test_without_a_database_the_child_is_ended_before_the_lease_is(light_shop: Shop) -> None:
    ended: list[str] = []
    nowhere = make_engine("postgresql+psycopg://nobody@127.0.0.1:9/none")
    with Heart(nowhere, Claim("ftjob-1", 1, 1), 0.6, 0.1, lambda: ended.append("child")) as heart:
        assert heart.lost.wait(WAIT_S)
    nowhere.dispose()
    assert ended == ["child"]


def test_a_heartbeat_that_would_come_too_late_for_the_lease_is_told(light_shop: Shop) -> None:
    with pytest.raises(Unfit, match="SPARD_HEARTBEAT_S is 60: it has to be less than 60"):
        Worker(light_shop.settings(lease_s=90.0, heartbeat_s=60.0))


def test_a_lease_that_somebody_else_has_ends_the_child(shop: Shop) -> None:
    job_id = shop.add_job()
    with shop.serving("deaf"):
        child = slow_child(shop)
        with transaction(shop.engine) as session:
            job = shop.job(job_id)
            lease.release(session, Claim(job_id, job.lease_token, job.attempt), "taken away by the test")
        wait_until(lambda: not child.is_running())


def test_a_database_that_drops_every_connection_costs_no_attempt(cloud_shop: Shop) -> None:
    job_id = cloud_shop.add_job()
    with cloud_shop.serving("late"):
        child = slow_child(cloud_shop)
        for _ in range(20):
            with transaction(cloud_shop.engine) as session:
                session.execute(text(f"{DROP_ALL} AND pid <> pg_backend_pid()"))
            time.sleep(0.1)
        child.terminate()
        job = cloud_shop.until_ended(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 1)


def test_a_database_that_only_reads_for_a_while_costs_no_attempt(cloud_shop: Shop) -> None:
    job_id, is_standby, refused = cloud_shop.add_job(), Event(), Event()
    with cloud_shop.serving("late") as worker:
        child = slow_child(cloud_shop)

        def begin(connection: Connection) -> None:
            if is_standby.is_set():
                connection.exec_driver_sql("SET TRANSACTION READ ONLY")

        event.listen(worker._backend.engine, "begin", begin)
        event.listen(worker._backend.engine, "handle_error", lambda context: refused.set())
        is_standby.set()
        child.terminate()
        assert refused.wait(WAIT_S)
        wait_until(lambda: not child.is_running())
        time.sleep(1.0)  # it tries to write how the attempt has ended
        is_standby.clear()
        job = cloud_shop.until_ended(job_id)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 1)
