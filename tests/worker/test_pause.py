"""Running jobs that are paused or take too long."""

from __future__ import annotations

from app.db import transaction
from app.db.tables import JobStatus
from app.jobs import transitions
from tests.narrowing import require
from tests.worker.shop import Shop, wait_until


def test_a_paused_job_is_checkpointed_and_goes_on_from_there(shop: Shop) -> None:
    job_id = shop.add_job()
    with shop.serving("slow"):
        wait_until(shop.is_slow)
        with transaction(shop.engine) as session:
            transitions.request_pause(session, job_id)
        wait_until(lambda: shop.job(job_id).status == JobStatus.paused)
        with transaction(shop.engine) as session:
            transitions.resume(session, job_id)
        job = shop.until_ended(job_id)
    steps = [event.split("/")[0] for event in shop.events(job_id) if event.startswith("Step ")]
    assert (job.status, job.lease_token) == (JobStatus.succeeded, 2)
    assert steps == [f"Step {i}" for i in (1, 2, 3, 4, 5, 6)]


def test_a_worker_takes_the_next_job_when_one_is_paused(light_shop: Shop) -> None:
    paused = light_shop.add_job()
    with light_shop.serving("slow"):
        wait_until(light_shop.is_slow)
        with transaction(light_shop.engine) as session:
            transitions.request_pause(session, paused)
        wait_until(lambda: light_shop.job(paused).status == JobStatus.paused)
        wait_until(lambda: not light_shop.is_slow())
        light_shop.add_job()
        wait_until(light_shop.is_slow)
    assert light_shop.job(paused).status == JobStatus.paused


def test_a_job_that_takes_too_long_is_ended(light_shop: Shop) -> None:
    job_id = light_shop.add_job()
    with light_shop.serving("deaf", max_run_s=1.0, reap_s=60.0):
        job = light_shop.until_ended(job_id)
    assert (job.status, require(job.error)["code"]) == (JobStatus.failed, "deadline_exceeded")
