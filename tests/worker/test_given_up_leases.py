"""A worker that cannot extend its lease ends its training process: nothing else, and no job, is blamed for that end."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from app.db.tables import JobStatus
from tests.worker.shop import Shop
from worker.heartbeat import Heart
from worker.listener import Listener
from worker.protocol import Message

LEASE_S = 1.0


def test_a_worker_that_gives_up_its_lease_blames_nobody_for_the_end_of_a_child_at_work(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = Heart.beat

    def fail_in_first_attempt(self: Heart, write: Callable[[Session], None] | None = None) -> None:
        if self._claim.token == 1:
            raise OperationalError("UPDATE jobs", None, Exception("the database is away"))
        beat(self, write)

    monkeypatch.setattr(Heart, "beat", fail_in_first_attempt)
    succeed_in_second_attempt(light_shop, "slow")


def test_nor_for_that_of_a_child_that_has_ended_before_the_worker_listens(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = Listener.listen

    def lose_lease_in_first_attempt(self: Listener, stop: Event) -> Message | None:
        if self._heart._claim.token == 1:
            self._heart._lose("no heartbeat")  # it kills the child, and reads what the child has sent
            assert self._child.is_over
        return listen(self, stop)

    monkeypatch.setattr(Listener, "listen", lose_lease_in_first_attempt)
    succeed_in_second_attempt(light_shop, "good")


def succeed_in_second_attempt(shop: Shop, behavior: str) -> None:
    job_id = shop.add_job(max_attempts=1000)
    with shop.serving(behavior, lease_s=LEASE_S):
        job = shop.until_ended(job_id)
    moved = {event for event in shop.events(job_id) if "moved back" in event}
    assert (job.status, moved) == (JobStatus.succeeded, {"Fine-tuning job moved back to the queue: lease_expired"})
