"""The API hands back what lost workers held, where no worker lives: on SQLite and on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import Engine, update

from app.db import now, transaction
from app.db.tables import Job, JobStatus
from app.main import create_app
from app.settings import Settings
from tests.app.conftest import AddJob
from tests.app.parts import claim_next, expire, job_of
from tests.narrowing import required
from tests.worker.shop import until


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
        until(lambda: {job_of(engine, each).status for each in (lost, overdue)} == {JobStatus.queued, JobStatus.failed})
    assert required(job_of(engine, overdue).error)["code"] == "deadline_exceeded"
