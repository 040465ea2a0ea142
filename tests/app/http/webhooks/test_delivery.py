"""An event is sent until it arrives, over days, and not to who is gone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Project, WebhookDelivery
from app.http import middleware
from app.webhooks.delivery import ATTEMPTS, Courier, wait_s
from tests.app.http.conftest import JOBS, Service
from tests.app.http.webhooks.conftest import HOOKS, Receiver, delivery, make_due


@pytest.mark.parametrize("status", [302, 400, 500, 503])
def test_what_is_not_taken_is_sent_again_with_the_same_id(
    status: int, service: Service, receiver: Receiver, cancelled_job: str, courier: Courier
) -> None:
    receiver.answers = [(status, {"location": receiver.url})]
    assert courier.deliver_due() == 1
    assert (delivery(service).status, delivery(service).outcome) == ("pending", f"answered {status}")
    assert courier.deliver_due() == 0
    make_due(service)
    courier.deliver_due()
    assert delivery(service).status == "delivered"
    assert [headers["webhook-id"] for _, headers in receiver.got] == [delivery(service).event_id] * 2
    assert receiver.got[0][0] == receiver.got[1][0]


def test_attempts_are_spread_over_days_and_end(
    service: Service, receiver: Receiver, cancelled_job: str, courier: Courier
) -> None:
    receiver.answers = [(500, {})] * 20
    for _ in range(20):
        make_due(service)
        courier.deliver_due()
    assert (delivery(service).status, len(receiver.got)) == ("failed", ATTEMPTS)
    assert 2 < sum(wait_s(attempt) for attempt in range(1, ATTEMPTS)) / 86_400 < 5


def test_retry_after_is_honored(service: Service, receiver: Receiver, cancelled_job: str, courier: Courier) -> None:
    receiver.answers = [(429, {"retry-after": "3600"})]
    courier.deliver_due()
    assert delivery(service).due_at == pytest.approx(time.time() + 3600, abs=30)


@pytest.mark.parametrize("wait", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "soon", "-5"])
def test_a_wait_that_cannot_be_read_is_none(
    wait: str, service: Service, receiver: Receiver, cancelled_job: str, courier: Courier
) -> None:
    receiver.answers = [(503, {"retry-after": wait})]
    assert courier.deliver_due() == 1
    assert (delivery(service).attempts, delivery(service).outcome) == (1, "answered 503")


def test_many_events_for_one_project_keep_none_from_another(
    service: Service, customer: TestClient, stranger: TestClient, receiver: Receiver, courier: Courier
) -> None:
    for client, endpoints, events in ((customer, 10, 20), (stranger, 1, 1)):
        for _ in range(endpoints):
            _queue(service, client.post(HOOKS, json={"url": receiver.url}).json()["id"], events)
    assert courier.deliver_due() == 8
    told = [json.loads(body)["data"]["id"] for body, _ in receiver.got]
    assert len(set(told)) == 8
    assert any(job_id.startswith("ftjob-1-") for job_id in told)


def test_events_for_one_endpoint_are_sent_one_after_the_other_in_order(
    service: Service, endpoint: dict[str, Any], receiver: Receiver, courier: Courier
) -> None:
    _queue(service, endpoint["id"], 3)
    assert [courier.deliver_due() for _ in range(4)] == [1, 1, 1, 0]
    assert [json.loads(body)["data"]["id"][-2:] for body, _ in receiver.got] == ["-0", "-1", "-2"]


def _queue(service: Service, endpoint_id: str, events: int) -> None:
    """Let jobs have ended, of which an endpoint is to be told; of one with fewer events, after all others."""
    with db.transaction(service.app.state.engine) as session:
        for i in range(events):
            row = WebhookDelivery(endpoint_id=endpoint_id, event_id=f"evt_{i}", type="fine_tuning.job.failed")
            row.job_id, row.due_at = f"ftjob-{events}-{endpoint_id}-{i}", float(1000 * (30 - events) + i)
            session.add(row)


def test_410_disables_the_endpoint_until_it_is_enabled_again(
    customer: TestClient, receiver: Receiver, endpoint: dict[str, Any], cancelled_job: str, courier: Courier
) -> None:
    receiver.answers = [(410, {})]
    courier.deliver_due()
    at = f"{HOOKS}/{endpoint['id']}"
    sent = customer.get(f"{at}/deliveries").json()["data"][0]
    assert (customer.get(at).json()["status"], sent["status"]) == ("disabled", "failed")
    refused = customer.post(f"{at}/deliveries/{sent['id']}/replay")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_state")

    assert customer.post(f"{at}/enable").json()["status"] == "enabled"
    assert customer.post(f"{at}/deliveries/{sent['id']}/replay").json()["status"] == "pending"
    courier.deliver_due()
    assert customer.get(f"{at}/deliveries").json()["data"][0]["status"] == "delivered"


def test_a_receiver_that_is_gone_is_tried_again(
    service: Service, customer: TestClient, job_body: dict[str, Any], courier: Courier, closed_port: int
) -> None:
    customer.post(HOOKS, json={"url": f"http://127.0.0.1:{closed_port}/"})
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    courier.deliver_due()
    assert (delivery(service).status, delivery(service).outcome) == ("pending", "no answer: ConnectionRefusedError")


def test_endpoints_and_deliveries_are_read_while_somebody_writes(
    service: Service, customer: TestClient, endpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{HOOKS}/{endpoint['id']}"
    monkeypatch.setattr(middleware, "LOCK_WAITS_S", 0.2)
    with db.transaction(service.app.state.engine) as session:  # takes SQLite's write lock
        session.add(Project(name="written"))
        session.flush()
        assert [customer.get(each).status_code for each in (path, f"{path}/deliveries")] == [200, 200]
        assert customer.get(f"{path}x").status_code == 404
