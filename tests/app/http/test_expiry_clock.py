"""What expires does so by the database's clock, also where the clock of the API's machine is days wrong."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import DeletedPlace, IdempotencyKey, Outbox
from app.retention import KEYS_STAY, prune
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows
from tests.app.http.test_uploads import CONTENT, announce, complete, send

HOUR = timedelta(hours=1)


@pytest.mark.usefixtures("wrong_clock")
def test_files_expire_by_it(upload: Upload, customer: TestClient) -> None:
    whole = upload(rows(10), **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json()
    part_of = announce(customer, expires_after={"anchor": "created_at", "seconds": 3600}).json()["id"]
    in_parts = complete(customer, part_of, send(customer, part_of, CONTENT).json()["id"]).json()["file"]
    for file in (whole, in_parts):
        assert abs(file["expires_at"] - time.time() - 3600) < 300
        assert file["expires_at"] - file["created_at"] == 3600


@pytest.mark.usefixtures("wrong_clock")
def test_rows_are_kept_by_it(service: Service, customer: TestClient, job_body: dict[str, str], upload: Upload) -> None:
    customer.post(JOBS, json=job_body, headers={"idempotency-key": "new"})
    customer.delete(f"{FILES}/{upload(rows(10)).json()['id']}")
    kept = [IdempotencyKey, DeletedPlace]

    def count() -> list[int]:
        with db.read(service.app.state.engine) as session:
            return [session.query(each).count() for each in kept]

    prune(lambda: db.transaction(service.app.state.engine))
    assert count() == [1, 1]
    with db.transaction(service.app.state.engine) as session:
        long_ago = db.clock(session) - KEYS_STAY - HOUR
        session.execute(update(IdempotencyKey).values(created_at=long_ago))
        session.execute(update(DeletedPlace).values(deleted_at=long_ago))
        session.add(Outbox(topic="jobs", payload={"job_id": "ftjob-1"}, sent_at=long_ago))
    prune(lambda: db.transaction(service.app.state.engine))
    assert count() == [0, 0]
