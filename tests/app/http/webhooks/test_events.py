"""Which events are told: each end of a job in the transaction that ends it, and what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select
from sqlalchemy.orm import Session

from app import db
from app.db.tables import WebhookDelivery
from app.db.tables.job_records import Adapter
from app.jobs import lease, transitions
from app.jobs.lease import reap
from app.webhooks.delivery import Courier
from tests.app.http.conftest import JOBS, Service
from tests.app.http.webhooks.conftest import HOOKS, Receiver, delivery, unwrap

ADAPTER: Adapter = {"storage_key": "key", "sha256": "0", "bytes": 1}


@pytest.mark.parametrize("end", ["succeeded", "failed", "reaped"])
def test_every_end_of_a_job_is_told(
    end: str, service: Service, customer: TestClient, endpoint: dict[str, Any], job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60, max_run_s=-1.0)
        assert claim is not None
        match end:
            case "succeeded":
                lease.publish(session, claim, lease.Publication("ft:m", 1, [], ADAPTER, {}, "key"))
            case "failed":
                lease.fail(session, claim, {"code": "gpu_oom", "message": "no memory", "param": None})
            case "reaped":
                reap(session)
    told = delivery(service)
    expected = "succeeded" if end == "succeeded" else "failed"
    assert (told.type, told.job_id, told.status) == (f"fine_tuning.job.{expected}", job_id, "pending")


def test_an_end_that_is_not_committed_is_not_told(
    service: Service, customer: TestClient, endpoint: dict[str, Any], job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with Session(service.app.state.engine) as session:
        transitions.request_cancel(session, job_id)
        session.rollback()
    with db.read(service.app.state.engine) as session:
        assert session.scalars(select(WebhookDelivery)).all() == []


def test_only_the_events_asked_for_are_sent(
    service: Service, customer: TestClient, receiver: Receiver, job_body: dict[str, Any]
) -> None:
    customer.post(HOOKS, json={"url": receiver.url, "events": ["fine_tuning.job.succeeded"]})
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    with db.read(service.app.state.engine) as session:
        assert session.scalars(select(WebhookDelivery)).all() == []


def test_a_project_has_at_most_ten_endpoints(customer: TestClient, receiver: Receiver) -> None:
    answers = [customer.post(HOOKS, json={"url": receiver.url}) for _ in range(11)]
    assert [each.status_code for each in answers] == [200] * 10 + [400]
    assert answers[-1].json()["error"]["code"] == "too_many_endpoints"


@pytest.mark.parametrize("end", ["publish", "reject"])
def test_an_audit_that_is_complete_is_told_to_those_who_asked(
    end: str, service: Service, customer: TestClient, receiver: Receiver, courier: Courier, job_body: dict[str, Any]
) -> None:
    endpoint = customer.post(HOOKS, json={"url": receiver.url, "events": ["safety.audit.completed"]}).json()
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        if end == "publish":
            assert lease.publish(session, claim, lease.Publication("ft:m", 1, [], ADAPTER, {}, "key"))
        else:
            assert lease.reject(session, claim, lease.Rejection("too harmful", 1, [], {}, "key"))
    courier.deliver_due()
    ((body, headers),) = receiver.got
    event = unwrap(endpoint["secret"], body, headers)
    assert (event.type, event.data.id) == ("safety.audit.completed", job_id)


def test_unless_asked_only_the_events_of_openai_are_sent(endpoint: dict[str, Any]) -> None:
    assert endpoint["events"] == [f"fine_tuning.job.{end}" for end in ("succeeded", "failed", "cancelled")]
