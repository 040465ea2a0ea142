"""Jobs that are given back, taken away or cancelled: the same on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from app.db import now, read, transaction
from app.db.tables import Job, JobEvent, JobStatus
from app.jobs import lease, transitions
from app.jobs.lease import Claim, reap
from tests.app.conftest import AddJob
from tests.app.parts import ERROR, PUBLICATION, claim_job, claim_next, expire, messages, read_job
from tests.narrowing import require


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_reaper_does_not_wait_for_a_worker_that_sleeps_in_its_transaction(engine: Engine, claim: Claim) -> None:
    expire(engine, claim.job_id)
    with transaction(engine) as worker, transaction(engine) as reaper:
        lease.publish(worker, claim, PUBLICATION)
        assert reap(reaper) == []


def test_a_queued_job_is_cancelled_at_once(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        assert transitions.request_cancel(session, job_id) == JobStatus.cancelled
    assert read_job(engine, job_id).finished_at
    with transaction(engine) as session:
        assert lease.claim(session, "worker", 60) is None


def test_a_running_job_is_cancelled_when_its_work_has_stopped(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        transitions.request_cancel(session, claim.job_id)
        assert lease.confirm_cancel(session, claim)
    assert read_job(engine, claim.job_id).status == JobStatus.cancelled


ENDS = {
    "published": lambda session, claim: lease.publish(session, claim, PUBLICATION),
    "failed": lambda session, claim: lease.fail(session, claim, ERROR),
    "overdue": lease.fail_overdue,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_job_that_was_cancelled_ends_as_nothing_else(
    end: Callable[[Session, Claim], bool], engine: Engine, claim: Claim
) -> None:
    with transaction(engine) as session:
        assert not lease.cancel_if_asked(session, claim)
        transitions.request_cancel(session, claim.job_id)
        assert not end(session, claim)
        assert lease.cancel_if_asked(session, claim)
    job = read_job(engine, claim.job_id)
    assert (job.status, job.error, job.adapter) == (JobStatus.cancelled, None, None)


def test_a_cancelled_job_that_is_overdue_is_cancelled(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        transitions.request_cancel(session, claim.job_id)
        session.execute(update(Job).values(deadline_at=now() - 1))
        assert reap(session) == [claim.job_id]
    assert read_job(engine, claim.job_id).status == JobStatus.cancelled


def test_an_ended_or_unknown_job_cannot_be_cancelled(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        lease.fail(session, claim, ERROR)
        assert transitions.request_cancel(session, claim.job_id) is None
        assert transitions.request_cancel(session, "ftjob-none") is None


def test_a_requeued_job_gets_a_new_token_and_attempt(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert lease.requeue(session, claim, 0, "the child died")
    assert claim_next(engine) == Claim(claim.job_id, token=2, attempt=2)
    assert "the child died" in messages(engine, claim.job_id)[1]


def test_a_requeued_job_waits_its_delay(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        lease.requeue(session, claim, 3600, "the child died")
        assert lease.claim(session, "worker", 60) is None


def test_the_last_attempt_is_not_queued_again(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    for _ in range(3):
        with transaction(engine) as session:
            lease.requeue(session, claim_job(session), 0, "the child died")
    job = read_job(engine, job_id)
    assert (job.status, job.attempt, require(job.error)["code"]) == (JobStatus.failed, 3, "worker_lost")


def test_a_failed_last_attempt_keeps_its_own_error(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(max_attempts=1)
    with transaction(engine) as session:
        lease.requeue(session, claim_job(session), 0, "no memory", ERROR)
    assert read_job(engine, job_id).error == ERROR


def test_a_released_job_has_its_attempt_back(engine: Engine, add_job: AddJob) -> None:
    add_job(max_attempts=1)
    with transaction(engine) as session:
        assert lease.release(session, claim_job(session), "the worker stops")
    assert claim_next(engine).token == 2


def test_the_reaper_queues_a_job_whose_lease_ran_out(engine: Engine, claim: Claim) -> None:
    expire(engine, claim.job_id)
    with transaction(engine) as session:
        assert reap(session) == [claim.job_id]
    assert read_job(engine, claim.job_id).status == JobStatus.queued
    with read(engine) as session:
        assert session.scalars(select(JobEvent.data).order_by(JobEvent.seq.desc())).first() == {
            "reason": "lease_expired",
            "attempt": 1,
        }


def test_the_reaper_leaves_a_job_with_a_good_lease(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert reap(session) == []


def test_the_reaper_ends_a_job_that_has_no_attempt_left(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(max_attempts=1)
    expire(engine, claim_next(engine).job_id)
    with transaction(engine) as session:
        reap(session)
    assert require(read_job(engine, job_id).error)["code"] == "worker_lost"


def test_the_reaper_ends_a_job_that_the_customer_cancelled(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        transitions.request_cancel(session, claim.job_id)
    expire(engine, claim.job_id)
    with transaction(engine) as session:
        reap(session)
    assert read_job(engine, claim.job_id).status == JobStatus.cancelled


def test_two_reapers_hand_a_job_back_once(engine: Engine, claim: Claim) -> None:
    expire(engine, claim.job_id)
    barrier = Barrier(4)

    def reap_too(_: int) -> list[str]:
        barrier.wait()
        with transaction(engine) as session:
            return reap(session)

    with ThreadPoolExecutor(4) as pool:
        assert [job for jobs in pool.map(reap_too, range(4)) for job in jobs] == [claim.job_id]
