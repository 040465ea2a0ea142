"""Pause and resume as OpenAI's clients ask for them: without a body, and told apart from the end."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.jobs import lease
from tests.app.http.conftest import JOBS, Service


@pytest.fixture
def job(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    return job_id


def test_a_paused_job_is_not_started_until_it_is_resumed(service: Service, customer: TestClient, job: str) -> None:
    assert customer.post(f"{JOBS}/{job}/pause").json()["status"] == "paused"
    with db.transaction(service.app.state.engine) as session:
        assert lease.claim(session, "worker", 60) is None
    assert customer.post(f"{JOBS}/{job}/resume").json()["status"] == "queued"
    with db.transaction(service.app.state.engine) as session:
        assert lease.claim(session, "worker", 60) is not None


def test_a_running_job_is_asked_to_pause(service: Service, customer: TestClient, job: str) -> None:
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
    assert customer.post(f"{JOBS}/{job}/pause").json()["status"] == "running"
    with db.transaction(service.app.state.engine) as session:
        lease.release(session, claim, "paused")
    assert customer.get(f"{JOBS}/{job}").json()["status"] == "paused"


def test_asking_twice_is_harmless(customer: TestClient, job: str) -> None:
    for wish, status in (("pause", "paused"), ("resume", "queued")):
        assert {customer.post(f"{JOBS}/{job}/{wish}").json()["status"] for _ in range(2)} == {status}


def test_a_paused_job_can_be_cancelled(customer: TestClient, job: str) -> None:
    customer.post(f"{JOBS}/{job}/pause")
    assert customer.post(f"{JOBS}/{job}/cancel").json()["status"] == "cancelled"


@pytest.mark.parametrize("wish", ["pause", "resume"])
def test_a_job_that_has_ended_is_neither_paused_nor_resumed(customer: TestClient, job: str, wish: str) -> None:
    customer.post(f"{JOBS}/{job}/cancel")
    got = customer.post(f"{JOBS}/{job}/{wish}")
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_state")


@pytest.mark.parametrize("wish", ["pause", "resume"])
def test_somebody_elses_job_reads_as_unknown(stranger: TestClient, job: str, wish: str) -> None:
    got = stranger.post(f"{JOBS}/{job}/{wish}")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "fine_tune_not_found")
