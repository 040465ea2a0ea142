"""Who may write to a job, and how its status moves: the same rules on SQLite and on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Engine, select, update
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from app.db import make_engine, read, transaction
from app.db.tables import AuditResult, Job, JobEvent, JobMetric, JobStatus
from app.db.tables.job_records import Progress, ResumeState
from app.jobs import events, lease, transitions
from app.jobs.lease import Claim, reap
from tests.app.conftest import AddJob
from tests.app.parts import ERROR, PUBLICATION, REJECTION, claim_job, claim_next, expire, facts, messages, read_job
from tests.narrowing import require


def test_the_oldest_job_is_claimed_first(engine: Engine, add_job: AddJob) -> None:
    jobs = [add_job() for _ in range(3)]
    assert [claim_next(engine).job_id for _ in jobs] == jobs


def test_nothing_is_claimed_when_nothing_is_queued(engine: Engine) -> None:
    with transaction(engine) as session:
        assert lease.claim(session, "worker", 60) is None


def test_a_job_waits_until_it_may_run(engine: Engine, add_job: AddJob) -> None:
    add_job(run_after=time.time() + 3600)
    later = add_job()
    assert claim_next(engine).job_id == later


def test_a_claim_is_the_job_s_first_attempt(engine: Engine, claim: Claim) -> None:
    job = read_job(engine, claim.job_id)
    assert (claim.token, claim.attempt, job.status, job.lease_owner) == (1, 1, JobStatus.running, "worker")
    assert job.started_at
    assert messages(engine, job.id) == ["Fine-tuning job started"]


@pytest.mark.parametrize("jobs", [1, 24])
def test_each_job_is_claimed_once_by_many_workers(database_url: str, add_job: AddJob, jobs: int) -> None:
    queued = {add_job() for _ in range(jobs)}
    barrier = Barrier(8)

    def work(worker: int) -> list[str]:
        engine = make_engine(database_url)
        mine: list[str] = []
        barrier.wait()
        while True:
            with transaction(engine) as session:
                claimed = lease.claim(session, f"worker-{worker}", 60)
            if claimed is None:
                engine.dispose()
                return mine
            mine.append(claimed.job_id)

    with ThreadPoolExecutor(8) as pool:
        claimed = [job for mine in pool.map(work, range(8)) for job in mine]
    assert sorted(claimed) == sorted(queued)


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_a_claim_does_not_wait_for_one_that_is_not_committed(engine: Engine, add_job: AddJob) -> None:
    jobs = [add_job(), add_job()]
    with transaction(engine) as first, transaction(engine) as second:
        assert [claim_job(first).job_id, claim_job(second).job_id] == jobs


def test_a_heartbeat_extends_the_lease(engine: Engine, claim: Claim) -> None:
    before = read_job(engine, claim.job_id).lease_expires_at or 0
    with transaction(engine) as session:
        assert lease.heartbeat(session, claim, 120) == lease.Pulse()
    assert (read_job(engine, claim.job_id).lease_expires_at or 0) > before + 50


def test_a_repeated_heartbeat_counts_the_same_computing_once(engine: Engine, claim: Claim) -> None:
    """It is repeated when its answer got lost on the way, and may have been stored before."""
    for passed_s, computed_s, counted in (
        (100.0, 60.0, 60.0),
        (0.0, 60.0, 60.0),
        (0.0, 55.0, 55.0),
        (0.0, 500.0, 100.0),
    ):
        pass_time(engine, passed_s)
        with transaction(engine) as session:
            lease.heartbeat(session, claim, 60, computed_s)
        assert read_job(engine, claim.job_id).gpu_seconds == pytest.approx(counted, abs=4.0)


@pytest.mark.parametrize(("computed_s", "counted"), [(20.0, 20.0), (50.0, 30.0)])
def test_a_worker_that_waited_beyond_its_lease_is_charged_what_it_computed_within(
    engine: Engine, claim: Claim, computed_s: float, counted: float
) -> None:
    """The end of a job may hang on its way, while it keeps others from the job's row."""
    with transaction(engine) as session:
        session.execute(update(Job).values(seen_at=Job.seen_at - 100.0, lease_expires_at=Job.seen_at - 70.0))
        lease.heartbeat(session, claim, 60, computed_s)
    assert read_job(engine, claim.job_id).gpu_seconds == pytest.approx(counted, abs=0.01)


def test_the_next_attempt_begins_anew_and_keeps_what_was_counted(engine: Engine, claim: Claim) -> None:
    pass_time(engine, 100.0)
    with transaction(engine) as session:
        lease.heartbeat(session, claim, 60, 40.0)
        session.execute(update(Job).values(waiting_for="storage"))
        transitions.hand_back(session, session.get_one(Job, claim.job_id), "its worker stops")
    with transaction(engine) as session:
        again = require(claim_job(session))
        lease.heartbeat(session, again, 60, 5.0)
    job = read_job(engine, claim.job_id)
    assert job.gpu_seconds_before == 40.0
    assert job.gpu_seconds == pytest.approx(40.0, abs=4.0)


def pass_time(engine: Engine, seconds: float) -> None:
    """Make the last heartbeat so many seconds older."""
    with transaction(engine) as session:
        session.execute(update(Job).values(seen_at=Job.seen_at - seconds))


def test_a_heartbeat_tells_that_the_customer_cancels(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        status = transitions.request_cancel(session, claim.job_id)
        assert (status, lease.heartbeat(session, claim, 60)) == (JobStatus.running, lease.Pulse(cancel_requested=True))


def test_progress_is_written(engine: Engine, claim: Claim) -> None:
    progress: Progress = {"percent": 5, "step": 10, "total_steps": 200, "eta_seconds": None}
    checkpoint: ResumeState = {"step": 10, "files": []}
    with transaction(engine) as session:
        assert lease.update(session, claim, phase="train", progress=progress, checkpoint=checkpoint)
    job = read_job(engine, claim.job_id)
    assert (job.phase, job.progress, job.checkpoint) == ("train", progress, checkpoint)


def test_a_step_trained_again_replaces_its_metrics(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        lease.record_metrics(session, claim, {1: {"loss/task": 2.0}, 2: {"loss/task": 1.0}})
        lease.record_metrics(session, claim, {2: {"loss/task": 0.5}, 3: {"loss/task": 0.2}})
        lease.record_metrics(session, claim, {})
    with read(engine) as session:
        rows = session.execute(select(JobMetric.step, JobMetric.data).order_by(JobMetric.step)).all()
    assert [(step, data["loss/task"]) for step, data in rows] == [(1, 2.0), (2, 0.5), (3, 0.2)]


def test_a_publication_appears_as_a_whole(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert lease.publish(session, claim, PUBLICATION)
    job = read_job(engine, claim.job_id)
    assert (job.status, job.fine_tuned_model, job.trained_tokens) == (JobStatus.succeeded, "ft:tiny:org::1", 7)
    assert (job.result_files, job.adapter, job.safety, job.report_key) == (
        PUBLICATION.result_files,
        PUBLICATION.adapter,
        PUBLICATION.safety,
        PUBLICATION.report_key,
    )
    assert job.finished_at
    assert job.lease_owner is None
    assert job.lease_expires_at is None


def test_a_publication_keeps_what_the_audit_measured(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        lease.publish(session, claim, PUBLICATION)
    with read(engine) as session:
        row = session.scalars(select(AuditResult)).one()
    assert (row.job_id, row.suite, row.hits) == (claim.job_id, "s", 1)


def test_a_publication_is_told_in_openai_s_words(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        lease.publish(session, claim, PUBLICATION)
    assert messages(engine, claim.job_id)[1:] == [
        "New fine-tuned model created: ft:tiny:org::1",
        "The job has successfully completed",
    ]


def test_a_rejected_adapter_has_a_report_and_no_model(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert lease.reject(session, claim, REJECTION)
    job = read_job(engine, claim.job_id)
    assert (job.status, job.fine_tuned_model, job.adapter) == (JobStatus.failed, None, None)
    assert job.error == {"code": "safety_gate_failed", "message": "ASR 0.4 is above 0.1.", "param": None}
    assert (job.safety, job.report_key) == (REJECTION.safety, REJECTION.report_key)


def test_a_failure_says_why(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        assert lease.fail(session, claim, ERROR)
    assert (read_job(engine, claim.job_id).error, messages(engine, claim.job_id)[-1]) == (ERROR, ERROR["message"])


WRITES: dict[str, Callable[[Session, Claim], object]] = {
    "fail_overdue": lease.fail_overdue,
    "heartbeat": lambda session, claim: lease.heartbeat(session, claim, 60),
    "update": lambda session, claim: lease.update(session, claim, phase="train"),
    "metrics": lambda session, claim: lease.record_metrics(session, claim, {1: {}}),
    "holds": lease.holds,
    "publish": lambda session, claim: lease.publish(session, claim, PUBLICATION),
    "reject": lambda session, claim: lease.reject(session, claim, REJECTION),
    "fail": lambda session, claim: lease.fail(session, claim, ERROR),
    "cancelled": lease.confirm_cancel,
    "requeue": lambda session, claim: lease.requeue(session, claim, 0, "reason"),
    "release": lambda session, claim: lease.release(session, claim, "reason"),
    "postpone": lambda session, claim: lease.release(session, claim, "reason", waits=True),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_worker_that_was_replaced_is_refused(engine: Engine, claim: Claim, write: str) -> None:
    expire(engine, claim.job_id)
    with transaction(engine) as session:
        reap(session)
        assert not WRITES[write](session, claim)
    newer = claim_next(engine)
    before = facts(engine, claim.job_id)
    with transaction(engine) as session:
        assert not WRITES[write](session, claim)
    assert facts(engine, claim.job_id) == before
    with transaction(engine) as session:
        assert lease.holds(session, newer)


@pytest.mark.parametrize("write", WRITES)
def test_an_ended_job_takes_no_write(engine: Engine, claim: Claim, write: str) -> None:
    with transaction(engine) as session:
        lease.publish(session, claim, PUBLICATION)
    before = facts(engine, claim.job_id)
    with transaction(engine) as session:
        assert not WRITES[write](session, claim)
    assert facts(engine, claim.job_id) == before


def test_the_database_itself_keeps_an_ended_job(engine: Engine, claim: Claim) -> None:
    with transaction(engine) as session:
        lease.fail(session, claim, ERROR)
    with pytest.raises(DatabaseError, match="never changes"), transaction(engine) as session:
        session.execute(update(Job).values(status=JobStatus.succeeded))


def test_events_of_many_writers_have_numbers_of_their_own(engine: Engine, claim: Claim) -> None:
    def write(worker: int) -> None:
        for turn in range(5):
            with transaction(engine) as session:
                events.append(session, claim.job_id, "info", "message", f"{worker}/{turn}", {"turn": turn})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    with read(engine) as session:
        assert session.scalars(select(JobEvent.seq).order_by(JobEvent.seq)).all() == list(range(1, 32))
