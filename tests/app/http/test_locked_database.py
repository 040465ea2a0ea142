"""Rows and databases that others have locked: refused in bounded time, as what they are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import make_url, select

from app import db
from app.db import session as db_session
from app.db.tables import Project, Quota
from app.main import create_app
from app.settings import Settings
from tests.app.http.conftest import FILES, JOBS, Service, offer, rows

WANTED = {"model": "lab/tiny-1", "training_file": "file-none"}


@pytest.fixture
def locked_client(service: Service, customer: TestClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A customer whose key was never used, while another program writes to SQLite."""
    monkeypatch.setattr("app.http.middleware.LOCK_WAITS_S", 0.2)
    monkeypatch.setattr("app.callers._USE_WAIT_S", 0.1)
    path = str(make_url(service.app.state.settings.database()).database)
    other = sqlite3.connect(path, isolation_level=None, timeout=60)
    other.execute("BEGIN IMMEDIATE")
    yield customer
    other.execute("ROLLBACK")
    other.close()


def test_an_upload_beside_a_locked_database_is_told_to_come_again(locked_client: TestClient) -> None:
    form = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    answer = locked_client.post(FILES, **form)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_read_beside_a_locked_database_is_answered(locked_client: TestClient) -> None:
    assert locked_client.get(JOBS).status_code == 200


@pytest.fixture
def on_postgres(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service on PostgreSQL, which waits for locked rows for a moment only."""
    brief = db_session._FOR_SESSION.replace("'5s'", "'0.2s'")
    monkeypatch.setattr(db_session, "_FOR_SESSION", brief)
    app = create_app(Settings(data_dir=tmp_path, database_url=SecretStr(postgres_url)))
    with TestClient(app) as http:
        yield Service(app, http)


def limit_jobs(service: Service, project: str, most: int) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.merge(Quota(project_id=project, max_unfinished_jobs=most))


def test_a_project_without_room_is_refused_while_its_row_is_locked(on_postgres: Service) -> None:
    customer = on_postgres.client("org-customer", "customer")
    limit_jobs(on_postgres, "org-customer", 0)
    with db.transaction(on_postgres.app.state.engine) as session:
        session.execute(select(Project.id).where(Project.id == "org-customer").with_for_update())
        answer = customer.post(JOBS, json=WANTED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")


def test_rows_that_other_requests_of_the_project_hold_are_a_reason_to_come_again(
    on_postgres: Service, tmp_path: Path
) -> None:
    offer(on_postgres.client("org-provider", "admin", "customer"), tmp_path / "model")
    customer = on_postgres.client("org-customer", "customer")
    file = customer.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()["id"]
    limit_jobs(on_postgres, "org-customer", 9)
    wanted = WANTED | {"training_file": file}
    with db.transaction(on_postgres.app.state.engine) as session:
        session.execute(select(Project.id).where(Project.id == "org-customer").with_for_update())
        answer = customer.post(JOBS, json=wanted)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_at_once")
    assert int(answer.headers["retry-after"]) >= 1
    assert customer.post(JOBS, json=wanted).status_code == 200


def test_a_request_that_was_sent_before_is_answered_although_there_is_no_more_room(
    job_body: dict[str, object], service: Service, customer: TestClient
) -> None:
    sent = {"headers": {"Idempotency-Key": "once"}, "json": job_body}
    made = customer.post(JOBS, **sent).json()["id"]  # type: ignore[arg-type]
    limit_jobs(service, "org-customer", 1)
    assert customer.post(JOBS, **sent).json()["id"] == made  # type: ignore[arg-type]
    again = customer.post(JOBS, json=job_body, headers={"x-stainless-retry-count": "1"})
    assert again.json()["id"] == made
    assert customer.post(JOBS, json=job_body).json()["error"]["code"] == "quota_exceeded"
