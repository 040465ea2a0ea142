"""On both databases: an ended job changes for an approved waiver and for nothing else, and two approvals make one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, update
from sqlalchemy.exc import DatabaseError

from app import keys, waivers
from app.catalog import service as catalog
from app.db import read, transaction
from app.db.tables import Job, JobStatus
from app.db.tables.job_records import HeldArchive
from app.errors import InvalidState
from app.jobs import lease
from app.jobs.lease import Rejection
from app.keys import Principal
from app.settings import Settings
from app.waivers import WaiverCreate
from tests.app.conftest import AddJob

HELD: HeldArchive = {"storage_key": "held", "sha256": "0", "bytes": 1, "manifest_sha256": "1"}
ASK = WaiverCreate(reason="For the red team's own study.", expires_at=int(time.time()) + 86400)


@pytest.fixture
def failed_job(engine: Engine, add_job: AddJob) -> str:
    job_id = add_job()
    with transaction(engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim
        assert lease.reject(session, claim, Rejection("No.", 1, [], {"gate": {"decision": "fail"}}, "r", held=HELD))
    return job_id


@pytest.fixture
def admins(engine: Engine) -> list[Principal]:
    with transaction(engine) as session:
        made = [keys.create(session, keys.FIRST_PROJECT, "test", ["admin"], name)[0] for name in ("ada", "bob", "eve")]
        return [Principal(key.project_id, key.id, frozenset(key.scopes)) for key in made]


def propose(engine: Engine, admin: Principal, job_id: str) -> str:
    with transaction(engine) as session:
        return waivers.propose(session, admin, job_id, ASK).id


def test_an_approved_waiver_makes_a_failed_job_succeed(
    engine: Engine, failed_job: str, admins: list[Principal], tmp_path: Path
) -> None:
    waiver_id = propose(engine, admins[0], failed_job)
    with transaction(engine) as session:
        waivers.approve(session, admins[1], failed_job, waiver_id, Settings(data_dir=tmp_path))
    with read(engine) as session:
        job = session.get_one(Job, failed_job)
    assert (job.status, job.adapter and job.adapter["storage_key"]) == (JobStatus.succeeded, "held")


def test_a_model_is_listed_until_its_waiver_ends(
    engine: Engine, failed_job: str, admins: list[Principal], tmp_path: Path
) -> None:
    waiver_id = propose(engine, admins[0], failed_job)
    with transaction(engine) as session:
        waivers.approve(session, admins[1], failed_job, waiver_id, Settings(data_dir=tmp_path))
    listed = []
    for _ in range(2):
        with transaction(engine) as session:
            job = session.get_one(Job, failed_job)
            listed.append([each.id for each in catalog.models(session, job.project_id)])
            assert job.safety
            job.safety = job.safety | {"waiver": job.safety["waiver"] | {"expires_at": int(time.time())}}
    assert listed == [[job.fine_tuned_model], []]


def test_a_proposal_alone_lets_nothing_through(engine: Engine, failed_job: str, admins: list[Principal]) -> None:
    propose(engine, admins[0], failed_job)
    with pytest.raises(DatabaseError, match="never changes"), transaction(engine) as session:
        session.execute(update(Job).where(Job.id == failed_job).values(status=JobStatus.succeeded))


def test_a_waiver_lets_no_other_change_through(
    engine: Engine, failed_job: str, admins: list[Principal], tmp_path: Path
) -> None:
    waiver_id = propose(engine, admins[0], failed_job)
    with transaction(engine) as session:
        waivers.approve(session, admins[1], failed_job, waiver_id, Settings(data_dir=tmp_path))
    with pytest.raises(DatabaseError, match="never changes"), transaction(engine) as session:
        session.execute(update(Job).where(Job.id == failed_job).values(status=JobStatus.queued))


def test_of_two_approvals_at_once_one_counts(
    engine: Engine, failed_job: str, admins: list[Principal], tmp_path: Path
) -> None:
    waiver_id = propose(engine, admins[0], failed_job)
    settings = Settings(data_dir=tmp_path)

    def approve(admin: Principal) -> bool:
        try:
            with transaction(engine) as session:
                waivers.approve(session, admin, failed_job, waiver_id, settings)
        except InvalidState:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(approve, admins[1:])) == [False, True]
