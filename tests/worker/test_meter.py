"""GPU time: counted while a job computes, not while it waits; and a storage that hangs holds up no news."""

from __future__ import annotations

from threading import Event

import pytest

from tests.narrowing import require
from tests.worker.shop import Shop, wait_until
from tests.worker.test_outages import running
from worker.attempt import call_if_slow
from worker.heartbeat import JUDGE, STORAGE, Meter
from worker.listener import StorageLane


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_before_work_begins_and_while_it_waits_is_idle(clock: Clock) -> None:
    meter = Meter(clock)
    clock.now += 5.0
    assert (meter.computed_seconds(), meter.wait_reason) == (0.0, STORAGE)
    clock.now += 1.0
    meter.resume()
    clock.now += 20.0
    assert (meter.computed_seconds(), meter.wait_reason) == (20.0, None)
    meter.pause(JUDGE, lost_s=4.0)  # it was asked in vain for so long
    clock.now += 10.0
    meter.pause(JUDGE, lost_s=3.0)  # that time was idle already
    meter.resume()
    clock.now += 2.0
    assert meter.computed_seconds() == 18.0
    meter.pause(JUDGE, lost_s=100.0)  # no more than since it last began to compute
    assert meter.computed_seconds() == 16.0


def test_tasks_are_done_in_order_and_their_results_by_who_listens() -> None:
    lane, go_on, done = StorageLane(), Event(), list[str]()

    def hang() -> None:
        go_on.wait()

    lane.submit(hang)
    lane.submit(lambda: lambda: done.append("old state"), "state")
    lane.submit(lambda: lambda: done.append("stage"))
    lane.submit(lambda: lambda: done.append("new state"), "state")
    lane.apply_results()
    assert len(done) == 0
    go_on.set()
    while not lane.is_idle:
        lane.wait(1.0)
    assert done == []
    lane.apply_results()
    assert done == ["stage", "new state"]
    lane.close()


def test_an_error_of_a_task_comes_to_who_listens() -> None:
    def fail() -> None:
        raise RuntimeError("unsafe")

    lane = StorageLane()
    lane.submit(fail)
    while not lane.is_idle:
        lane.wait(1.0)
    with pytest.raises(RuntimeError, match="unsafe"):
        lane.apply_results()
    lane.close()


def test_a_block_that_ends_in_time_is_not_told_of() -> None:
    told, slow = list[str](), Event()
    with call_if_slow(3600.0, lambda: told.append("early")):
        pass
    with call_if_slow(0.0, slow.set):
        slow.wait()
    assert told == []


def test_the_news_come_while_the_storage_hangs_and_only_computing_is_billed(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first upload hangs until the test has seen that the job's phase goes on; that time costs nothing."""
    hangs, goes_on = Event(), Event()
    write = type(light_shop.storage).write

    def slow_write(self: object, key: str, content: object) -> object:
        if "/stage/" in key:
            hangs.set()
            goes_on.wait()
        return write(self, key, content)  # type: ignore[arg-type]

    monkeypatch.setattr(type(light_shop.storage), "write", slow_write)
    job_id = light_shop.add_job()
    with running(light_shop, "good", storage_notice_s=0.1):
        wait_until(hangs.is_set)
        wait_until(lambda: any("waits for the service's storage" in each for each in light_shop.events(job_id)))
        job = light_shop.job(job_id)
        assert (job.phase, require(job.progress)["step"]) == ("package", 6)  # all that the child has said
        wait_until(lambda: light_shop.job(job_id).waiting_for == STORAGE)
        before = light_shop.job(job_id).gpu_seconds
        seen_at = light_shop.job(job_id).seen_at or 0.0
        wait_until(lambda: (light_shop.job(job_id).seen_at or 0.0) > seen_at + 1.0)
        assert light_shop.job(job_id).gpu_seconds == pytest.approx(before, abs=0.2)
        goes_on.set()
        assert light_shop.until_ended(job_id).status == "succeeded"
