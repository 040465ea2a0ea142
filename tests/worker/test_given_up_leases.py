"""A worker that cannot extend its lease ends its training process: nothing else, and no job, is blamed for that end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from app.db.tables import JobStatus
from tests.worker.shop import Shop
from worker.heartbeat import Heart

LEASE_S = 1.0


@pytest.mark.parametrize("behavior", ["slow", "good"])  # it is still at work, or has come to its end meanwhile
def test_a_worker_that_gives_up_its_lease_blames_nobody_for_the_end_of_its_child(
    light_shop: Shop, behavior: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = Heart.beat

    def fail_in_first_attempt(self: Heart, write: Callable[[Session], None] | None = None) -> None:
        if self._claim.token == 1:
            if behavior == "good":  # its lease is given up before it has begun
                self._lose("no heartbeat")
            raise OperationalError("UPDATE jobs", None, Exception("the database is away"))
        beat(self, write)

    monkeypatch.setattr(Heart, "beat", fail_in_first_attempt)
    job_id = light_shop.add_job(max_attempts=1000)
    with light_shop.serving(behavior, lease_s=LEASE_S):
        job = light_shop.until_ended(job_id)
    moved = {event for event in light_shop.events(job_id) if "moved back" in event}
    assert (job.status, moved) == (JobStatus.succeeded, {"Fine-tuning job moved back to the queue: lease_expired"})
