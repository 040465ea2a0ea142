"""What nobody needs any more leaves the storage, and nothing else does."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from app import db, objects
from app.db.base import new_id, utc_now
from app.db.tables import File
from app.db.tables.job_records import Adapter
from app.jobs import lease
from app.jobs.lease import Publication
from app.retention import sweep, sweep_attempts
from app.storage import StorageError
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows


def run_sweep(service: Service) -> None:
    sweep(service.app.state.storage, partial(db.transaction, service.app.state.engine))


def attempts_swept(service: Service) -> None:
    """As if a day had passed."""
    begin = partial(db.transaction, service.app.state.engine)
    sweep_attempts(begin, stay=timedelta(seconds=-1))
    objects.sweep(service.app.state.storage, begin)


def write(service: Service, statement: Any) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.execute(statement)


def file_storage_key(service: Service, file_id: str) -> str:
    with db.read(service.app.state.engine) as session:
        return session.scalars(select(File.storage_key).where(File.id == file_id)).one()


def expire(service: Service, file_id: str) -> None:
    write(service, update(File).where(File.id == file_id).values(expires_at=utc_now() - timedelta(seconds=1)))


def test_the_bytes_of_an_expired_file_go_and_others_stay(service: Service, upload: Upload) -> None:
    gone, stays = upload(rows(10)).json()["id"], upload(rows(11)).json()["id"]
    keys = [file_storage_key(service, file_id) for file_id in (gone, stays)]
    expire(service, gone)
    run_sweep(service)
    assert [service.app.state.storage.exists(key) for key in keys] == [False, True]
    with db.read(service.app.state.engine) as session:
        assert session.scalars(select(File.id)).all() == [stays]


def test_a_file_that_an_unfinished_job_needs_stays_until_the_job_has_ended(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id, file_id = customer.post(JOBS, json=job_body).json()["id"], job_body["training_file"]
    key = file_storage_key(service, file_id)
    expire(service, file_id)
    run_sweep(service)
    assert service.app.state.storage.exists(key)
    customer.post(f"{JOBS}/{job_id}/cancel")
    run_sweep(service)
    assert not service.app.state.storage.exists(key)


def away(key: str) -> None:
    raise StorageError("The storage does not answer.")


def test_bytes_that_an_outage_left_behind_go_with_the_next_sweep(
    service: Service, customer: TestClient, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = upload(rows(10)).json()["id"]
    storage, key = service.app.state.storage, file_storage_key(service, file_id)
    with monkeypatch.context() as outage:
        outage.setattr(storage, "delete", away)
        assert customer.delete(f"{FILES}/{file_id}").status_code == 503
    assert storage.exists(key)
    run_sweep(service)
    assert not storage.exists(key)


def _publish_third_attempt(service: Service, customer: TestClient, asked: dict[str, Any]) -> tuple[str, list[str]]:
    """A job that a third attempt has published; each attempt has left something."""
    job_id = customer.post(JOBS, json=asked).json()["id"]
    keys = [f"tenants/org-customer/jobs/{job_id}/a{token}/out/adapter.tar.gz" for token in (1, 2, 3)]
    for key in keys:
        service.app.state.storage.write(key, [b"x"])
    with db.transaction(service.app.state.engine) as session:
        for _ in range(2):
            claim = lease.claim(session, "worker", 60)
            assert claim is not None
            lease.release(session, claim, "a test")
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        csv = File(id=new_id("file-"), project_id="org-customer", filename="a.csv", purpose="fine-tune-results")
        csv.bytes, csv.sha256, csv.status, csv.storage_key = 1, "", "processed", keys[2]
        session.add(csv)
        adapter: Adapter = {"storage_key": keys[2], "sha256": "", "bytes": 1}
        assert lease.publish(session, claim, Publication("ft:m", 1, [csv.id], adapter, {}, keys[2]))
    return job_id, keys


def test_abandoned_attempts_go_after_a_day_and_never_the_published_one(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    storage = service.app.state.storage
    _, keys = _publish_third_attempt(service, customer, job_body)
    run_sweep(service)
    assert [storage.exists(key) for key in keys] == [True, True, True]
    attempts_swept(service)
    assert [storage.exists(key) for key in keys] == [False, False, True]


def test_of_the_published_attempt_goes_what_another_would_have_gone_on_from(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    storage = service.app.state.storage
    job_id, keys = _publish_third_attempt(service, customer, job_body)
    left = [f"tenants/org-customer/jobs/{job_id}/a3/{name}" for name in ("checkpoints/step-000003/a", "stage/a.json")]
    for key in left:  # a worker ended before the row named them, or after it named newer ones
        storage.write(key, [b"x"])
    attempts_swept(service)
    assert [storage.exists(key) for key in (*left, keys[2])] == [False, False, True]


def test_a_swept_job_can_be_erased(service: Service, customer: TestClient, job_body: dict[str, Any]) -> None:
    job_id, keys = _publish_third_attempt(service, customer, job_body)
    attempts_swept(service)
    assert customer.delete(f"{JOBS}/{job_id}").status_code == 200
    assert not service.app.state.storage.exists(keys[2])


def test_the_attempts_of_a_job_that_goes_on_stay(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    key = f"tenants/org-customer/jobs/{job_id}/a1/checkpoints/step-1/state"
    service.app.state.storage.write(key, [b"x"])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        lease.release(session, claim, "a test")
    attempts_swept(service)
    assert service.app.state.storage.exists(key)
