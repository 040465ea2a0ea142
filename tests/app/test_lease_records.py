"""What the moves of a job leave behind: answers, events, deliveries and seconds; on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from app.db import now, read, transaction
from app.db.tables import (
    AuditResult,
    HeldAdapter,
    Job,
    JobEvent,
    JobMetric,
    JobStatus,
    WebhookDelivery,
    WebhookEndpoint,
)
from app.db.tables.job_records import HeldArchive, JobError
from app.jobs import lease, transitions
from app.jobs.lease import Claim, reap
from tests.app.conftest import AddJob
from tests.app.parts import ERROR, PUBLICATION, REJECTION, claim_job, claim_next, expire, messages, read_job
from tests.app.test_lease import WRITES

Write = Callable[[Session, Claim], Any]
HELD: HeldArchive = {"storage_key": "a1/held.tar.gz", "sha256": "0", "bytes": 3, "manifest_sha256": "1"}
REJECTED = replace(REJECTION, audit_results=PUBLICATION.audit_results, held=HELD)


@pytest.fixture
def listening(engine: Engine, claim: Claim) -> Claim:
    """A claimed job whose project hears of everything."""
    told = [*(f"fine_tuning.job.{each}" for each in ("succeeded", "failed", "cancelled")), "safety.audit.completed"]
    with transaction(engine) as session:
        project_id = session.get_one(Job, claim.job_id).project_id
        session.add(WebhookEndpoint(project_id=project_id, url="https://hooks.example/", events=told, secret="s"))
    return claim


def deliveries(engine: Engine) -> list[str]:
    with read(engine) as session:
        return sorted(session.scalars(select(WebhookDelivery.type)))


def last_event(engine: Engine, job_id: str) -> tuple[str, str, Any]:
    with read(engine) as session:
        of_job = select(JobEvent).where(JobEvent.job_id == job_id).order_by(JobEvent.seq.desc())
        found = session.scalars(of_job.limit(1)).one()
    return found.level, found.message, found.data


@pytest.mark.parametrize("name", sorted(set(WRITES) - {"heartbeat"}))
def test_a_write_answers_true_or_false(engine: Engine, claim: Claim, name: str) -> None:
    with transaction(engine) as session:
        assert WRITES[name](session, replace(claim, token=claim.token + 1)) is False
        assert WRITES[name](session, replace(claim, job_id="ftjob-none")) is False
        assert WRITES[name](session, claim) is True


@pytest.mark.parametrize(
    ("write", "types"),
    [
        (lambda session, claim: lease.publish(session, claim, PUBLICATION), ["succeeded", "audit"]),
        (lambda session, claim: lease.reject(session, claim, REJECTED), ["failed", "audit"]),
        (lambda session, claim: lease.fail(session, claim, ERROR), ["failed"]),
        (lease.fail_overdue, ["failed"]),
    ],
)
def test_the_customer_is_told_of_an_end_and_of_an_audit(
    engine: Engine, listening: Claim, write: Write, types: list[str]
) -> None:
    with transaction(engine) as session:
        assert write(session, listening)
    names = {"audit": "safety.audit.completed"}
    assert deliveries(engine) == sorted(names.get(each, f"fine_tuning.job.{each}") for each in types)


def test_a_cancelled_job_says_so(engine: Engine, listening: Claim) -> None:
    with transaction(engine) as session:
        transitions.request_cancel(session, listening.job_id)
        assert lease.confirm_cancel(session, listening)
    assert deliveries(engine) == ["fine_tuning.job.cancelled"]
    assert last_event(engine, listening.job_id)[:2] == ("info", "Fine-tuning job cancelled")
    job = read_job(engine, listening.job_id)
    assert job.finished_at
    assert job.lease_owner is None
    assert job.lease_expires_at is None


def test_a_paused_job_says_so_and_has_no_owner(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        transitions.request_pause(session, claim.job_id)
        lease.release(session, claim, "the customer pauses")
    assert last_event(engine, claim.job_id)[:2] == ("info", "Fine-tuning job paused")
    job = read_job(engine, claim.job_id)
    assert job.lease_owner is None
    assert job.lease_expires_at is None


def test_a_rejection_keeps_what_was_measured_and_the_adapter_for_a_waiver(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert lease.reject(session, claim, REJECTED)
    with read(engine) as session:
        assert session.scalars(select(AuditResult.suite)).all() == ["s"]
        held = session.scalars(select(HeldAdapter)).one()
    assert (held.job_id, held.storage_key, held.bytes) == (claim.job_id, "a1/held.tar.gz", 3)
    error: JobError = {"code": "safety_gate_failed", "message": REJECTED.message, "param": None}
    assert last_event(engine, claim.job_id) == ("error", REJECTED.message, error)


def test_a_failure_s_event_holds_its_error(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert lease.fail(session, claim, ERROR)
    assert last_event(engine, claim.job_id) == ("error", ERROR["message"], ERROR)


def test_a_later_attempt_says_which_it_is(engine: Engine, add_job: AddJob) -> None:
    add_job(max_attempts=4)
    first = claim_next(engine)
    with transaction(engine) as session:
        lease.requeue(session, first, 0, "the child died")
    again = claim_next(engine)
    assert (again.token, again.attempt) == (2, 2)
    assert messages(engine, again.job_id)[-1] == "Fine-tuning job started again (attempt 2 of 4)"


def test_a_job_that_was_lost_too_often_tells_how_often_and_why(engine: Engine, listening: Claim) -> None:
    with transaction(engine) as session:
        session.execute(update(Job).values(max_attempts=1))
        lease.requeue(session, listening, 0, "the child died")
    message = "The job stopped once without an end: the child died. The provider reads the workers' logs."
    error: JobError = {"code": "worker_lost", "message": message, "param": None}
    job = read_job(engine, listening.job_id)
    assert job.error == error
    assert last_event(engine, job.id) == ("error", message, {**error, "reason": "the child died"})
    assert deliveries(engine) == ["fine_tuning.job.failed"]


def test_metrics_of_other_jobs_stay(engine: Engine, add_job: AddJob) -> None:
    claims = []
    for _ in range(2):
        add_job()
        claims.append(claim_next(engine))
    with transaction(engine) as session:
        for claim in (*claims, claims[0]):
            assert lease.record_metrics(session, claim, {1: {"loss/task": 1.0}}) is True
        kept = session.execute(select(JobMetric.job_id)).scalars().all()
    assert sorted(kept) == sorted(claim.job_id for claim in claims)


def used_s(engine: Engine, job_id: str) -> float:
    return read_job(engine, job_id).gpu_seconds


def test_time_counts_while_a_worker_has_the_job_and_not_while_it_waits(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        session.execute(update(Job).values(seen_at=Job.seen_at - 1000, lease_expires_at=now() + 60))
        assert lease.release(session, claim, "the worker stops")
    worked = used_s(engine, claim.job_id)
    assert 1000 <= worked < 2000
    with transaction(engine) as session:
        session.execute(update(Job).values(seen_at=Job.seen_at - 9000))
        transitions.request_cancel(session, claim.job_id)
    assert used_s(engine, claim.job_id) == worked


def test_time_does_not_run_backwards(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        session.execute(update(Job).values(seen_at=now() + 5000))
        assert lease.release(session, claim, "the worker stops")
    assert used_s(engine, claim.job_id) == 0.0


def test_the_reaper_names_the_lost_and_the_overdue(engine: Engine, add_job: AddJob) -> None:
    jobs = [add_job(max_attempts=2), add_job(), add_job()]
    for job_id in jobs:
        assert claim_next(engine).job_id == job_id
    expire(engine, jobs[0])
    with transaction(engine) as session:
        session.execute(update(Job).where(Job.id == jobs[1]).values(deadline_at=now() - 1))
        assert reap(session) == sorted(jobs[:2])
    assert [read_job(engine, each).status for each in jobs] == [JobStatus.queued, JobStatus.failed, JobStatus.running]


def test_an_overdue_job_whose_lease_ran_out_too_is_ended_once(engine: Engine, listening: Claim) -> None:
    expire(engine, listening.job_id)
    with transaction(engine) as session:
        session.execute(update(Job).values(deadline_at=now() - 1))
        assert reap(session) == [listening.job_id]
    assert deliveries(engine) == ["fine_tuning.job.failed"]


def test_what_is_locked_is_read_anew(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        known = session.get_one(Job, claim.job_id)
        changed = update(Job).values(phase="audit").execution_options(synchronize_session=False)
        session.execute(changed)
        assert transitions.lock_jobs(session, Job.id == claim.job_id).one() is known
        assert known.phase == "audit"


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_reaper_does_not_wait_for_an_overdue_job_that_is_being_ended(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        session.execute(update(Job).values(deadline_at=now() - 1))
    with transaction(engine) as worker, transaction(engine) as reaper:
        lease.fail_overdue(worker, claim)
        assert reap(reaper) == []


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_worker_waits_for_a_customer_who_changes_the_job(engine: Engine, claim: Claim) -> None:
    found: list[bool] = []
    done = Event()

    def ask() -> None:
        with transaction(engine) as session:
            found.append(lease.holds(session, claim))
        done.set()

    with transaction(engine) as customer:
        transitions.request_cancel(customer, claim.job_id)
        thread = Thread(target=ask)
        thread.start()
        done.wait(0.5)  # time in which a worker that does not wait would be told that the lease is lost
    thread.join()
    assert found == [True]


def test_a_released_job_may_start_at_once(engine: Engine, add_job: AddJob) -> None:
    add_job()
    with transaction(engine) as session:
        assert lease.release(session, claim_job(session), "the worker stops")
        assert claim_job(session)
