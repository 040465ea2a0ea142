"""Customers are told when a job has ended: signed, and again until it arrives."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from app import db
from app.jobs import lease
from app.main import create_app
from app.settings import Settings
from app.webhooks.courier import ATTEMPTS, Courier, wait_s
from app.webhooks.models import WebhookDelivery, WebhookEndpoint
from tests.app.http.conftest import JOBS, Service

HOOKS = "/v1/webhook_endpoints"


class Receiver:
    """A customer's server: keeps what it gets, and answers what the test wants."""

    def __init__(self) -> None:
        self.got: list[tuple[bytes, dict[str, str]]] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append((body, {name.lower(): value for name, value in self.headers.items()}))
                status, headers = receiver.answers.pop(0) if receiver.answers else (200, {})
                self.send_response(status)
                for name, value in {"content-length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?a=b"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


@pytest.fixture
def service(sqlite_url: str, tmp_path: Path) -> Iterator[Service]:
    """Without its threads: the test itself says when something is delivered."""
    settings = Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url), webhooks_to_loopback=True)
    app = create_app(settings)
    yield Service(app, TestClient(app))
    app.state.engine.dispose()


@pytest.fixture
def courier(service: Service) -> Courier:
    return Courier(service.app.state.engine, allow_local=True)


@pytest.fixture
def endpoint(customer: TestClient, receiver: Receiver) -> dict[str, Any]:
    made: dict[str, Any] = customer.post(HOOKS, json={"url": receiver.url}).json()
    return made


@pytest.fixture
def cancelled(customer: TestClient, endpoint: dict[str, Any], asked: dict[str, Any]) -> str:
    """A job that ended after the endpoint was made."""
    job_id: str = customer.post(JOBS, json=asked).json()["id"]
    assert customer.post(f"{JOBS}/{job_id}/cancel").json()["status"] == "cancelled"
    return job_id


def make_due(service: Service) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(WebhookDelivery).values(due_at=0.0))


def delivery(service: Service) -> WebhookDelivery:
    with db.read(service.app.state.engine) as session:
        return session.scalars(select(WebhookDelivery)).one()


def unwrap(secret: str, body: bytes, headers: dict[str, str]) -> Any:
    return openai.OpenAI(api_key="-", webhook_secret=secret).webhooks.unwrap(body.decode(), headers)


def test_the_official_client_unwraps_what_is_sent(
    receiver: Receiver, endpoint: dict[str, Any], cancelled: str, courier: Courier
) -> None:
    assert courier.deliver_due() == 1
    ((body, headers),) = receiver.got
    event = unwrap(endpoint["secret"], body, headers)
    assert (event.type, event.data.id) == ("fine_tuning.job.cancelled", cancelled)
    assert (event.object, event.id, len(body) < 20_000) == ("event", headers["webhook-id"], True)
    assert courier.deliver_due() == 0


@pytest.mark.parametrize("change", ["body", "secret", "time"])
def test_what_was_tampered_with_is_refused_by_the_official_client(
    change: str, receiver: Receiver, endpoint: dict[str, Any], cancelled: str, courier: Courier
) -> None:
    courier.deliver_due()
    ((body, headers),) = receiver.got
    secret = endpoint["secret"]
    match change:
        case "body":
            body = body.replace(b"cancelled", b"succeeded")
        case "secret":
            secret = "whsec_" + "A" * 43 + "="
        case "time":
            headers["webhook-timestamp"] = str(int(time.time()) - 301)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(secret, body, headers)


@pytest.mark.parametrize("end", ["succeeded", "failed", "reaped"])
def test_every_end_of_a_job_is_told(
    end: str, service: Service, customer: TestClient, endpoint: dict[str, Any], asked: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=asked).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60, max_run_s=-1.0)
        assert claim is not None
        match end:
            case "succeeded":
                lease.publish(session, claim, lease.Publication("ft:m", 1, [], {}, {}, "key"))
            case "failed":
                lease.fail(session, claim, {"code": "gpu_oom", "message": "no memory", "param": None})
            case "reaped":
                lease.reap(session)
    told = delivery(service)
    expected = "succeeded" if end == "succeeded" else "failed"
    assert (told.type, told.job_id, told.status) == (f"fine_tuning.job.{expected}", job_id, "pending")


def test_an_end_that_is_not_committed_is_not_told(
    service: Service, customer: TestClient, endpoint: dict[str, Any], asked: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=asked).json()["id"]
    with Session(service.app.state.engine) as session:
        lease.cancel(session, job_id)
        session.rollback()
    with db.read(service.app.state.engine) as session:
        assert session.scalars(select(WebhookDelivery)).all() == []


@pytest.mark.parametrize("status", [302, 400, 500, 503])
def test_what_is_not_taken_is_sent_again_with_the_same_id(
    status: int, service: Service, receiver: Receiver, cancelled: str, courier: Courier
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
    service: Service, receiver: Receiver, cancelled: str, courier: Courier
) -> None:
    receiver.answers = [(500, {})] * 20
    for _ in range(20):
        make_due(service)
        courier.deliver_due()
    assert (delivery(service).status, len(receiver.got)) == ("failed", ATTEMPTS)
    assert 2 < sum(wait_s(attempt) for attempt in range(1, ATTEMPTS)) / 86_400 < 5


def test_retry_after_is_honoured(service: Service, receiver: Receiver, cancelled: str, courier: Courier) -> None:
    receiver.answers = [(429, {"retry-after": "3600"})]
    courier.deliver_due()
    assert delivery(service).due_at == pytest.approx(time.time() + 3600, abs=30)


def test_410_disables_the_endpoint_until_it_is_enabled_again(
    customer: TestClient, receiver: Receiver, endpoint: dict[str, Any], cancelled: str, courier: Courier
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


def test_after_a_rotation_both_secrets_are_valid_for_a_day(
    service: Service, customer: TestClient, receiver: Receiver, endpoint: dict[str, Any], cancelled: str
) -> None:
    courier, at = Courier(service.app.state.engine, allow_local=True), f"{HOOKS}/{endpoint['id']}"
    new = customer.post(f"{at}/rotate").json()["secret"]
    courier.deliver_due()
    for secret in (endpoint["secret"], new):
        assert unwrap(secret, *receiver.got[0]).data.id == cancelled
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(WebhookEndpoint).values(old_secret_until=WebhookEndpoint.created_at))
    customer.post(f"{at}/deliveries/{delivery(service).id}/replay")
    courier.deliver_due()
    assert unwrap(new, *receiver.got[1]).data.id == cancelled
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(endpoint["secret"], *receiver.got[1])


def test_the_secret_is_shown_once(customer: TestClient, endpoint: dict[str, Any]) -> None:
    assert endpoint["secret"].startswith("whsec_")
    for path in (HOOKS, f"{HOOKS}/{endpoint['id']}"):
        assert endpoint["secret"] not in customer.get(path).text


def test_only_the_events_asked_for_are_sent(
    service: Service, customer: TestClient, receiver: Receiver, asked: dict[str, Any]
) -> None:
    customer.post(HOOKS, json={"url": receiver.url, "events": ["fine_tuning.job.succeeded"]})
    job_id = customer.post(JOBS, json=asked).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    with db.read(service.app.state.engine) as session:
        assert session.scalars(select(WebhookDelivery)).all() == []


def test_a_tenant_has_at_most_ten_endpoints(customer: TestClient, receiver: Receiver) -> None:
    answers = [customer.post(HOOKS, json={"url": receiver.url}) for _ in range(11)]
    assert [each.status_code for each in answers] == [200] * 10 + [400]
    assert answers[-1].json()["error"]["code"] == "too_many_endpoints"


def test_a_receiver_that_is_gone_is_tried_again(
    service: Service, customer: TestClient, asked: dict[str, Any], courier: Courier, free_port: Callable[[], int]
) -> None:
    customer.post(HOOKS, json={"url": f"http://127.0.0.1:{free_port()}/"})
    job_id = customer.post(JOBS, json=asked).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    courier.deliver_due()
    assert (delivery(service).status, delivery(service).outcome) == ("pending", "no answer: ConnectionRefusedError")


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
            return port

    return find
