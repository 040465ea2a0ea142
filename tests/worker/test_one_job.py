"""A worker of one job: it serves that job or none, and says how it ended."""

from __future__ import annotations

import pytest

from app.db.tables import JobStatus
from tests.worker.shop import WAIT_S, Shop, scripted_command
from worker.worker import Exit, Worker


def one(shop: Shop, job_id: str, token: int | None = None, behavior: str = "succeed") -> Exit:
    return Worker(shop.settings(), scripted_command(behavior)).run_one(job_id, token)


def test_it_serves_the_job_that_is_named_and_no_other(shop: Shop) -> None:
    first, second = (shop.add_job(waived=True) for _ in range(2))
    assert one(shop, second) == Exit.done
    assert (shop.job(first).status, shop.job(second).status) == (JobStatus.queued, JobStatus.succeeded)
    assert shop.job(second).attempt == 1


def test_a_job_that_has_ended_or_never_was_is_not_claimed(light_shop: Shop) -> None:
    job_id = light_shop.add_job(waived=True)
    assert [one(light_shop, job_id), one(light_shop, job_id), one(light_shop, "ftjob-none")] == [
        Exit.done,
        Exit.nothing,
        Exit.nothing,
    ]
    assert light_shop.job(job_id).attempt == 1


def test_one_that_was_started_for_another_attempt_is_late(light_shop: Shop) -> None:
    job_id = light_shop.add_job(waived=True, lease_token=4)
    assert one(light_shop, job_id, token=3) == Exit.nothing
    assert light_shop.job(job_id).status == JobStatus.queued
    assert one(light_shop, job_id, token=4) == Exit.done
    assert light_shop.job(job_id).lease_token == 5


def test_a_job_that_fails_is_told_by_the_code(light_shop: Shop) -> None:
    job_id = light_shop.add_job()
    assert one(light_shop, job_id, behavior="bad_data") == Exit.failed
    assert light_shop.job(job_id).status == JobStatus.failed


def test_the_command_says_by_its_code_that_there_is_nothing_to_claim(light_shop: Shop) -> None:
    assert light_shop.start("worker", "--job", "ftjob-none").wait(WAIT_S) == Exit.nothing


def test_a_token_without_a_job_is_refused(capfd: pytest.CaptureFixture[str], light_shop: Shop) -> None:
    assert light_shop.start("worker", "--token", "1").wait(WAIT_S) == 2
    assert "--token needs --job" in capfd.readouterr().err
