"""Whose job is taken next, and what a job's customer may want of it: on SQLite and on PostgreSQL."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import Engine, update

from app import keys
from app.db import read, transaction
from app.db.tables import Job, JobStatus, Project
from app.db.tables.job_records import JobError, Progress
from app.jobs import lease, scheduling, transitions
from app.jobs.lease import Claim, reap
from tests.app.conftest import AddJob
from tests.narrowing import require

ERROR: JobError = {"code": "server_error", "message": "The job failed.", "param": None}


@pytest.fixture
def small(engine: Engine) -> dict[str, str]:
    """The columns of a job of another project."""
    return _project(engine, "org-small")


def test_a_project_with_one_job_is_not_behind_one_with_many(
    engine: Engine, add_job: AddJob, small: dict[str, str]
) -> None:
    many = [add_job() for _ in range(5)]
    one = add_job(**small)
    assert [_claim(engine).job_id for _ in range(4)] == [many[0], one, *many[1:3]]


def test_the_project_with_the_fewest_running_jobs_is_served(
    engine: Engine, add_job: AddJob, small: dict[str, str]
) -> None:
    others = [add_job(**small) for _ in range(3)]
    mine = [add_job() for _ in range(3)]
    taken = [_claim(engine) for _ in range(4)]
    with transaction(engine) as session:
        lease.fail(session, next(claim for claim in taken if claim.job_id == others[0]), ERROR)
    assert {claim.job_id for claim in taken} == {*others[:2], *mine[:2]}
    assert _claim(engine).job_id == others[2]


def test_within_a_project_its_priority_decides(engine: Engine, add_job: AddJob) -> None:
    usual, urgent, late = add_job(), add_job(priority=-5), add_job(priority=5)
    assert [_claim(engine).job_id for _ in range(3)] == [urgent, usual, late]


def test_a_priority_is_no_advantage_over_other_projects(engine: Engine, add_job: AddJob, small: dict[str, str]) -> None:
    urgent = [add_job(priority=-100) for _ in range(3)]
    one = add_job(**small)
    assert [_claim(engine).job_id for _ in range(2)] == [urgent[0], one]


def test_the_position_counts_the_turns_of_others(engine: Engine, add_job: AddJob, small: dict[str, str]) -> None:
    jobs = [add_job(), add_job(), add_job(priority=-1), *(add_job(**small) for _ in range(1))]
    with read(engine) as session:
        rows = [session.get_one(Job, job_id) for job_id in jobs]
        together = scheduling.positions(session, rows)
        one_by_one = [scheduling.positions(session, [row])[row.id] for row in rows]
    assert [together[job_id] for job_id in jobs] == one_by_one == [3, 4, 1, 1]


def test_a_job_that_does_not_wait_has_no_position(engine: Engine, add_job: AddJob) -> None:
    running, waiting = add_job(), add_job()
    _claim(engine)
    with read(engine) as session:
        rows = [session.get_one(Job, job_id) for job_id in (running, waiting)]
        assert scheduling.positions(session, rows) == {waiting: 1}
        assert scheduling.positions(session, rows[:1]) == {}


def test_a_job_s_deadline_is_set_when_it_first_starts(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    claim = _claim(engine, max_run_s=100)
    first = _job(engine, job_id).deadline_at or 0
    with transaction(engine) as session:
        lease.requeue(session, claim, 0, "the child died")
    _claim(engine, max_run_s=1000)
    assert (_job(engine, job_id).deadline_at, first > time.time() + 50) == (first, True)


def test_a_heartbeat_tells_that_the_time_is_over(engine: Engine, add_job: AddJob) -> None:
    add_job()
    claim = _claim(engine, max_run_s=-1)
    with transaction(engine) as session:
        assert lease.heartbeat(session, claim, 60) == lease.Pulse(is_overdue=True)


@pytest.mark.parametrize("status", [JobStatus.running, JobStatus.queued])
def test_the_reaper_ends_a_job_whose_time_is_over(engine: Engine, add_job: AddJob, status: JobStatus) -> None:
    job_id = add_job()
    claim = _claim(engine, max_run_s=-1)
    with transaction(engine) as session:
        session.execute(update(Job).values(status=status))
        assert reap(session) == [job_id]
        assert not lease.heartbeat(session, claim, 60)
    assert require(_job(engine, job_id).error)["code"] == "deadline_exceeded"


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(max_attempts=9)
    for _ in range(2):
        _crash(engine, step=3)
    job = _job(engine, job_id)
    assert (job.status, job.attempt, require(job.error)["code"]) == (JobStatus.failed, 2, "worker_lost")


def test_a_failure_further_on_is_tried_again(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(max_attempts=9)
    for step in (3, 4, 3):
        _crash(engine, step)
    assert _job(engine, job_id).status == JobStatus.queued


def test_what_is_not_the_job_s_fault_is_not_counted_against_it(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(max_attempts=9)
    for _ in range(3):
        claim = _claim(engine)
        with transaction(engine) as session:
            lease.requeue(session, claim, 0, "the storage does not answer", ERROR)
    assert _job(engine, job_id).status == JobStatus.queued


def test_a_paused_job_is_not_taken_until_it_is_resumed(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        assert transitions.request_pause(session, job_id) == JobStatus.paused
        assert lease.claim(session, "worker", 60) is None
        assert transitions.resume(session, job_id) == JobStatus.queued
    assert _claim(engine).job_id == job_id


def test_a_running_job_is_paused_when_its_work_has_stopped(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    claim = _claim(engine, max_run_s=100)
    with transaction(engine) as session:
        status = transitions.request_pause(session, job_id)
        assert (status, lease.heartbeat(session, claim, 60)) == (JobStatus.running, lease.Pulse(pause_requested=True))
        lease.release(session, claim, "the customer pauses")
    job = _job(engine, job_id)
    assert (job.status, job.attempt, job.deadline_at, job.pause_requested_at) == (JobStatus.paused, 0, None, None)


def test_a_job_whose_worker_is_lost_while_it_should_pause_is_paused(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    _claim(engine)
    with transaction(engine) as session:
        transitions.request_pause(session, job_id)
        session.execute(update(Job).values(lease_expires_at=0.0))
    with transaction(engine) as session:
        reap(session)
    assert _job(engine, job_id).status == JobStatus.paused


def test_a_wish_to_pause_can_be_taken_back(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    claim = _claim(engine)
    with transaction(engine) as session:
        transitions.request_pause(session, job_id)
        assert transitions.resume(session, job_id) == JobStatus.running
        assert lease.heartbeat(session, claim, 60) == lease.Pulse()


def test_a_paused_job_is_cancelled_at_once(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        transitions.request_pause(session, job_id)
        assert transitions.request_cancel(session, job_id) == JobStatus.cancelled


def test_an_ended_job_is_neither_paused_nor_resumed(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        transitions.request_cancel(session, job_id)
        assert transitions.request_pause(session, job_id) is transitions.resume(session, job_id) is None


def _project(engine: Engine, project_id: str) -> dict[str, str]:
    with transaction(engine) as session:
        session.add(Project(id=project_id, name=project_id))
        session.flush()
        key, _ = keys.create(session, project_id, "test", ["customer"])
        return {"project_id": project_id, "key_id": key.id}


def _claim(engine: Engine, max_run_s: float | None = None) -> Claim:
    with transaction(engine) as session:
        claim = lease.claim(session, "worker", 60, max_run_s)
    assert claim
    return claim


def _crash(engine: Engine, step: int) -> None:
    claim = _claim(engine)
    with transaction(engine) as session:
        progress: Progress = {"percent": 0, "step": step, "total_steps": None, "eta_seconds": None}
        lease.update(session, claim, phase="train", progress=progress)
        lease.requeue(session, claim, 0, "the child died (signal 11)", blames_job=True)


def _job(engine: Engine, job_id: str) -> Job:
    with read(engine) as session:
        return session.get_one(Job, job_id)
