"""The API hands back what lost workers held, where no worker lives: on SQLite and on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import Engine, update

from app.db import now, transaction
from app.db.tables import Job, JobStatus
from app.jobs import lease
from app.main import create_app
from app.settings import Settings
from tests.app.conftest import AddJob
from tests.app.parts import claim_next, expire, read_job
from tests.narrowing import require
from tests.worker.shop import wait_until


def test_the_api_reaps_where_no_worker_lives(
    engine: Engine, database_url: str, add_job: AddJob, tmp_path: Path
) -> None:
    lost, overdue = add_job(), add_job()
    assert [claim_next(engine).job_id for _ in range(2)] == [lost, overdue]
    expire(engine, lost)
    with transaction(engine) as session:
        session.execute(update(Job).where(Job.id == overdue).values(deadline_at=now() - 1))
    settings = Settings(data_dir=tmp_path, database_url=SecretStr(database_url), reap_s=0.1)
    with TestClient(create_app(settings)):
        wait_until(
            lambda: {read_job(engine, each).status for each in (lost, overdue)} == {JobStatus.queued, JobStatus.failed}
        )
    assert require(read_job(engine, overdue).error)["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("waits", "counted"), [("", 60.0), ("judge", 0.0)])
def test_a_worker_that_dies_while_its_job_waits_bills_nothing_more(
    engine: Engine, add_job: AddJob, waits: str, counted: float
) -> None:
    add_job()
    claim = claim_next(engine)
    with transaction(engine) as session:
        lease.heartbeat(session, claim, 60.0, 0.0, waits)
        session.execute(update(Job).values(lease_expires_at=Job.seen_at - 40.0, gpu_seconds=10.0))
        session.execute(update(Job).values(seen_at=Job.seen_at - 100.0))
    lease.reap_once(engine)
    with transaction(engine) as session:
        assert session.get_one(Job, claim.job_id).gpu_seconds == pytest.approx(10.0 + counted, abs=0.01)
