"""An adapter that is taken back while a job is made that starts from it: on SQLite and on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
from sqlalchemy import Engine, select

from app.db import transaction
from app.db.tables import Job, JobStatus
from app.errors import InvalidState
from app.jobs import project_models
from app.jobs.request import JobCreate
from app.keys import Principal
from tests.app.conftest import AddJob

MODEL = "ft:tiny:org:1"
ADAPTER = {"storage_key": "jobs/adapter", "sha256": "0", "bytes": 1}


def test_a_deletion_waits_for_the_job_that_starts_from_the_adapter(engine: Engine, add_job: AddJob) -> None:
    done = {"status": JobStatus.succeeded, "fine_tuned_model": MODEL, "adapter": ADAPTER}
    first = add_job(safety={"gate": {"decision": "pass"}}, **done)
    begun, ask = Event(), JobCreate(model=MODEL, training_file="file-1")

    def delete() -> None:
        begun.set()
        with transaction(engine) as session:
            job = session.scalars(select(Job).where(Job.id == first).with_for_update()).one()
            project_models.check_unneeded(session, job)

    second = add_job()
    with ThreadPoolExecutor() as threads:
        with transaction(engine) as session:
            project_id = session.get_one(Job, first).project_id
            start = project_models.find_start(session, Principal(project_id, "key", frozenset({"customer"})), ask)
            deletion = threads.submit(delete)
            begun.wait()
            with pytest.raises(TimeoutError):
                deletion.result(timeout=0.5)
            assert start is not None
            job = session.get_one(Job, second)
            job.spec = replace(job.spec, start_from=start.reference())
        with pytest.raises(InvalidState, match=second):
            deletion.result()
