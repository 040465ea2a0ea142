"""Checkpoints from the child to the rows: each once, whatever is killed between write, upload and publication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app.checkpoints import records
from app.db import read, transaction
from app.db.tables import CondemnedObject, Job, JobCheckpoint, JobStatus
from app.db.tables.jobs import FINAL
from app.jobs import transitions
from app.signing import signing_key
from app.storage import StorageError
from spard.release.manifest import verify
from tests.app.parts import claim_job, epoch_end
from tests.narrowing import require
from tests.worker.shop import Shop, wait_until
from worker.results import CheckpointArchives


def rows(shop: Shop, job: Job) -> list[JobCheckpoint]:
    with read(shop.engine) as session:
        query = select(JobCheckpoint).where(JobCheckpoint.job_id == job.id).order_by(JobCheckpoint.step)
        return list(session.scalars(query))


def created_events(shop: Shop, job: Job) -> list[str]:
    return [event for event in shop.events(job.id) if event.startswith("Checkpoint created")]


def check(shop: Shop, job: Job) -> None:
    """Three checkpoints, told of once each, and the bytes of two of them beside the adapter."""
    found = rows(shop, job)
    assert [(row.step, row.kind) for row in found] == [(2, "epoch"), (4, "epoch"), (6, "final")]
    assert created_events(shop, job) == [f"Checkpoint created at step {step}" for step in (2, 4, 6)]
    for row in found[:2]:
        assert row.storage_key
        assert len(shop.content(row.storage_key)) == row.bytes


def test_three_epochs_are_three_checkpoints(shop: Shop, tmp_path: Path) -> None:
    job = shop.do("good", checkpoints=100)
    assert job.status == JobStatus.succeeded
    check(shop, job)
    row = rows(shop, job)[0]
    assert row.metrics == {"train_loss": 0.5, "full_valid_loss": 1.0}
    assert require(row.safety)["gate"]["decision"] == "pass"
    archive = tmp_path / "checkpoint.tar.gz"
    archive.write_bytes(shop.content(require(row.storage_key)))
    key = signing_key(shop.settings()).public_key()
    assert verify(archive, key).manifest["checkpoint"] == {"step": 2}


def test_a_job_of_an_older_version_has_its_last_epoch_alone(light_shop: Shop) -> None:
    job = light_shop.do("good")
    assert [(row.step, row.kind) for row in rows(light_shop, job)] == [(6, "final")]


def test_what_failed_its_audit_never_reaches_the_storage(shop: Shop) -> None:
    job = shop.do("unsafe_epochs", checkpoints=100)
    found = rows(shop, job)
    assert [require(row.safety)["gate"]["decision"] for row in found] == ["fail", "fail", "pass"]
    assert [row.storage_key for row in found] == [None, None, None]
    for step in (2, 4):
        key = f"tenants/{job.project_id}/jobs/{job.id}/a1/epochs/step-{step:06d}/adapter.tar.gz"
        assert not shop.storage.exists(key)


def test_epochs_that_passed_outlive_a_job_that_did_not(light_shop: Shop) -> None:
    job = light_shop.do("failed_at_the_end", checkpoints=100)
    assert (job.status, require(job.error)["code"]) == (JobStatus.failed, "safety_gate_failed")
    decisions = [require(row.safety)["gate"]["decision"] for row in rows(light_shop, job)]
    assert decisions == ["pass", "pass", "fail"]
    check(light_shop, job)


def test_a_child_that_crashes_after_an_epoch_lists_it_once(shop: Shop) -> None:
    job = shop.do("crash_once", checkpoints=100)
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    check(shop, job)


def _call_then_fail(function: Callable[..., Any]) -> Callable[..., Any]:
    def call_and_fail(*args: Any) -> Any:
        function(*args)
        raise RuntimeError("killed")

    return call_and_fail


def _fail_first(function: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise RuntimeError("killed")

    return fail


POINTS = {
    "before the upload": (CheckpointArchives, "upload", _fail_first),
    "after the upload": (CheckpointArchives, "upload", _call_then_fail),
    "before the rows": (records, "record", _fail_first),
    "before the commit": (records, "record", _call_then_fail),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_dies_anywhere_in_between_lists_each_once(
    shop: Shop, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt breaks off there, and the next one does what is missing."""
    place, name, when = POINTS[point]
    real, died = getattr(place, name), list[str]()

    def dies_once(*args: Any) -> Any:
        results = args[-1]
        if died or not results:
            return real(*args)
        died.append(point)
        return when(real)(*args)

    monkeypatch.setattr(place, name, dies_once)
    job_id = shop.add_job(checkpoints=100)
    with shop.serving("good"):
        wait_until(lambda: bool(died) and _is_retried(shop, job_id))
        job = shop.until_ended(job_id)
    assert (job.status, job.attempt, died) == (JobStatus.succeeded, 2, [point])
    check(shop, job)


def _is_retried(shop: Shop, job_id: str) -> bool:
    """Let the lease of the first attempt run out; whether another attempt has the job."""
    of_the_first = (Job.id == job_id) & (Job.attempt == 1)
    with transaction(shop.engine) as session:
        session.execute(update(Job).where(of_the_first).values(lease_expires_at=0.0))
        return session.scalar(select(Job.id).where(of_the_first)) is None


def test_a_commit_whose_answer_is_lost_is_made_once(light_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    real = records.record

    def twice(session: Session, claim: Any, results: Any) -> bool:
        return real(session, claim, results) and real(session, claim, results)

    monkeypatch.setattr(records, "record", twice)
    check(light_shop, light_shop.do("good", checkpoints=100))


def test_a_storage_that_refuses_costs_the_checkpoint_and_not_the_job(
    light_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = type(light_shop.storage)
    real = storage.upload_file

    def refuses(self: Any, key: str, path: Path) -> Any:
        if "/epochs/" in key:
            raise StorageError("away")
        return real(self, key, path)

    monkeypatch.setattr(storage, "upload_file", refuses)
    job = light_shop.do("good", checkpoints=100)
    assert job.status == JobStatus.succeeded
    assert [row.storage_key for row in rows(light_shop, job)] == [None, None, None]


@pytest.mark.parametrize(("behavior", "decision"), [("best", "pass"), ("best_is_unsafe", "fail")])
def test_the_epoch_that_a_job_ends_with_is_its_own_adapter_and_has_no_other(
    light_shop: Shop, behavior: str, decision: str
) -> None:
    """Its small audit has passed; what the whole audit says counts, and the archive of the small one goes."""
    job = light_shop.do(behavior, checkpoints=100)
    found = rows(light_shop, job)
    assert [(row.step, row.kind) for row in found] == [(2, "epoch"), (4, "final"), (6, "epoch")]
    assert require(found[1].safety)["gate"]["decision"] == decision
    assert [row.storage_key is None for row in found] == [False, True, False]
    assert created_events(light_shop, job) == [f"Checkpoint created at step {step}" for step in (2, 4, 6)]
    assert require(job.safety)["ending"]["released_step"] == 4
    with read(light_shop.engine) as session:
        going = session.scalars(select(CondemnedObject.storage_key)).all()
    key = f"tenants/{job.project_id}/jobs/{job.id}/a1/epochs/step-000004/adapter.tar.gz"
    assert key in going or not light_shop.storage.exists(key)


@pytest.mark.parametrize("audits_last", [True, False])
def test_a_job_that_is_cancelled_audits_its_last_end_before_where_its_owner_wants_it(
    shop: Shop, audits_last: bool
) -> None:
    job_id = shop.add_job(checkpoints=100)
    with shop.serving("unaudited"):
        wait_until(shop.is_slow)
        with transaction(shop.engine) as session:
            transitions.request_cancel(session, job_id, audits_last=audits_last)
        job = shop.until_ended(job_id)
    assert (job.status, job.adapter) == (JobStatus.cancelled, None)
    found = {row.step: row for row in rows(shop, job)}
    assert (found[2].safety, found[2].storage_key) == (None, None)
    assert (found[4].safety is not None, found[4].storage_key is not None) == (audits_last, audits_last)
    assert created_events(shop, job) == [f"Checkpoint created at step {step}" for step in (2, 4)]
    assert ("Checkpoint of step 4 audited: pass" in shop.events(job_id)) == audits_last


def test_an_end_of_an_epoch_that_is_audited_later_is_released_then(light_shop: Shop) -> None:
    job_id = light_shop.add_job(checkpoints=100)
    adapter: Any = {"storage_key": "a1/epochs/step-000005/adapter.tar.gz", "sha256": "0" * 64, "bytes": 9}
    with transaction(light_shop.engine) as session:
        claim = claim_job(session)
        assert records.record(session, claim, {5: epoch_end(1.0, None)})
        for result in (epoch_end(1.0, "pass", adapter), epoch_end(1.0, None)):
            assert records.record(session, claim, {5: result})
        job = session.get_one(Job, job_id)
    found = rows(light_shop, job)[0]
    assert (require(found.safety)["gate"]["decision"], found.storage_key) == ("pass", adapter["storage_key"])


def test_the_epoch_that_a_job_ends_with_stays_beside_the_latest(light_shop: Shop) -> None:
    job_id = light_shop.add_job(checkpoints=100)
    with transaction(light_shop.engine) as session:
        claim = claim_job(session)
        for step in (5, 10, 15, 20, 25):
            assert records.record(session, claim, {step: epoch_end(1.0)})
        assert records.record(session, claim, {5: replace(epoch_end(1.0), kind=FINAL)})
        job = session.get_one(Job, job_id)
    assert [(row.step, row.kind) for row in rows(light_shop, job)] == [(5, "final"), (20, "epoch"), (25, "epoch")]
