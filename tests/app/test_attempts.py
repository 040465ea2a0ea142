"""Attempts count from where a job came furthest to; what was not its fault costs none. On SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import Engine, update

from app.db import now, transaction
from app.db.tables import Job, JobStatus
from app.db.tables.job_records import ResumeState
from app.db.tables.job_spec import ModelRef
from app.jobs import lease
from app.jobs.lease import Claim, reap
from tests.app.conftest import AddJob
from tests.app.parts import SPEC, claim_job, claim_next, expire, messages, read_job
from tests.narrowing import require

LOSSES = 20


def resume_state(step: int | None, *stages: str) -> ResumeState:
    """What a worker has put into storage."""
    files = [{"path": f"stage/{each}.json", "key": each, "sha256": "0"} for each in stages]
    return {"step": step, "files": files}  # type: ignore[typeddict-item]


def lose(engine: Engine, record: ResumeState | None = None) -> Claim:
    """One more attempt whose worker dies, after it has kept something or nothing."""
    claim = claim_next(engine)
    with transaction(engine) as session:
        if record is not None:
            assert lease.update(session, claim, checkpoint=record)
    expire(engine, claim.job_id)
    with transaction(engine) as session:
        assert reap(session) == [claim.job_id]
    return claim


def test_a_job_that_makes_checkpoints_may_be_lost_any_number_of_times(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    for i in range(LOSSES):
        lose(engine, resume_state(10 * (i + 1)))
    job = read_job(engine, job_id)
    assert (job.status, job.attempt, job.attempts_before_progress) == (JobStatus.queued, LOSSES, LOSSES)
    assert claim_next(engine).token == LOSSES + 1


def test_a_job_whose_pieces_are_halved_again_and_again_has_attempts_left(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    pieces = ["pieces", *(f"pieces-{rows}" for rows in (64, 32, 16, 8, 4, 2, 1))]
    for i in range(len(pieces)):
        lose(engine, resume_state(None, *pieces[: i + 1]))
    assert read_job(engine, job_id).status == JobStatus.queued


@pytest.mark.parametrize("record", [None, resume_state(10)])
def test_a_job_that_comes_no_further_ends_after_its_attempts(
    engine: Engine, add_job: AddJob, record: ResumeState | None
) -> None:
    job_id = add_job()
    lose(engine, resume_state(10))
    for _ in range(3):
        assert read_job(engine, job_id).status == JobStatus.queued
        lose(engine, record)
    job = read_job(engine, job_id)
    assert (job.status, require(job.error)["code"]) == (JobStatus.failed, "worker_lost")
    assert "stopped 4 times without coming further" in require(job.error)["message"]


def test_steps_that_are_trained_again_after_damage_are_no_progress(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    lose(engine, resume_state(30))
    for step in (10, 20, 30):
        lose(engine, resume_state(step))
    assert read_job(engine, job_id).status == JobStatus.failed


def test_the_output_of_another_stage_is_progress(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    for stages in (("embed",), ("embed", "select"), ("embed", "select", "audit")):
        lose(engine, resume_state(None, *stages))
        lose(engine, resume_state(None, *stages))
    assert read_job(engine, job_id).status == JobStatus.queued


def test_a_job_says_which_attempt_since_it_came_further_begins(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    lose(engine, resume_state(10))
    lose(engine)
    claim_next(engine)
    started = [each for each in messages(engine, job_id) if each.startswith("Fine-tuning job started")]
    assert started == [
        "Fine-tuning job started",
        "Fine-tuning job started again (attempt 1 of 3 since its last progress)",
        "Fine-tuning job started again (attempt 2 of 3 since its last progress)",
    ]


def test_a_failure_before_a_new_checkpoint_is_not_the_same_as_one_after_it(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job(max_attempts=9)
    for step in (10, 20, 30):
        claim = claim_next(engine)
        with transaction(engine) as session:
            lease.update(session, claim, checkpoint=resume_state(step))
            lease.requeue(session, claim, 0, "the child died", blames_job=True)
    assert read_job(engine, job_id).status == JobStatus.queued


def test_what_is_around_a_job_costs_no_attempt_and_waits_longer_each_time(engine: Engine, add_job: AddJob) -> None:
    job_id, delays = add_job(), list[float]()
    for _ in range(LOSSES):
        with transaction(engine) as session:
            session.execute(update(Job).values(run_after=0.0))
            assert lease.release(session, claim_job(session), "the storage does not answer", waits=True)
            delays.append((session.scalar(update(Job).values(phase="x").returning(Job.run_after - now()))) or 0.0)
    job = read_job(engine, job_id)
    assert (job.status, job.attempt, job.attempts_before_progress, job.waits) == (JobStatus.queued, 0, 0, LOSSES)
    assert [round(each / 5.0) for each in delays[:4]] == [1, 2, 4, 8]
    assert max(delays) <= 300
    assert "the storage does not answer" in messages(engine, job_id)[-1]


def test_a_job_that_comes_further_waits_a_short_time_again(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        lease.release(session, claim_job(session), "the storage does not answer", waits=True)
        session.execute(update(Job).values(run_after=0.0))
    lose(engine, resume_state(10))
    assert read_job(engine, job_id).waits == 0


def test_a_job_is_left_to_other_workers_for_a_while(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        lease.requeue(session, claim_job(session), 0, "the disk is full", avoid_s=3600)
        assert lease.claim(session, "worker", 60) is None
        assert require(lease.claim(session, "another", 60)).job_id == job_id


def test_a_worker_that_is_alone_gets_its_job_again_in_the_end(engine: Engine, add_job: AddJob) -> None:
    add_job()
    with transaction(engine) as session:
        lease.requeue(session, claim_job(session), 0, "the disk is full", avoid_s=3600)
        session.execute(update(Job).values(excluded_until=now() - 1))
        assert claim_job(session)


def test_a_worker_takes_no_job_whose_base_model_it_lacks(engine: Engine, add_job: AddJob) -> None:
    add_job()
    other = add_job(spec=replace(SPEC, model=ModelRef(alias="other", source="/models/other")))
    with transaction(engine) as session:
        claim = require(lease.claim(session, "worker", 60, None, ["/models/tiny"]))
        assert claim.job_id == other
        assert lease.claim(session, "worker", 60, None, ["/models/tiny"]) is None
        assert lease.claim(session, "another", 60)


def test_a_stop_after_progress_gives_no_attempt_more_than_there_are(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    claim = claim_next(engine)
    with transaction(engine) as session:
        lease.update(session, claim, checkpoint=resume_state(10))
        lease.release(session, claim, "the worker stops")
    job = read_job(engine, job_id)
    assert (job.attempt, job.attempts_before_progress) == (0, 0)
    for _ in range(3):
        lose(engine)
    assert read_job(engine, job_id).status == JobStatus.failed
