"""A project with queued jobs, as the service's tests need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from app import keys
from app.db import transaction
from app.db.tables import Job
from app.jobs.lease import Claim
from tests.app.parts import SPEC, claim_next
from tests.inspected_folders import remembered_stubs

AddJob = Callable[..., str]


@pytest.fixture(scope="session", autouse=True)
def stubs() -> Iterator[None]:
    """The same stub of a base model is inspected once."""
    with remembered_stubs():
        yield


@pytest.fixture
def add_job(engine: Engine) -> AddJob:
    """Queue a job, each later than the one before."""
    with transaction(engine) as session:
        keys.ensure_first(session, None)
        key, _ = keys.create(session, keys.FIRST_PROJECT, "test", ["customer"])
    made = 0

    def add(**columns: Any) -> str:
        nonlocal made
        made += 1
        asked = {"model": "tiny", "training_file": "file-1", "recipe": {}, "spec": SPEC, "request_hash": "0"}
        asked |= {"project_id": key.project_id, "key_id": key.id}
        created_at = datetime.now(UTC) + timedelta(seconds=made)
        with transaction(engine) as session:
            job = Job(created_at=created_at, **{**asked, **columns})
            session.add(job)
            session.flush()
            return job.id

    return add


@pytest.fixture
def claim(engine: Engine, add_job: AddJob) -> Claim:
    add_job()
    return claim_next(engine)
