"""A customer's server that webhooks are sent to, and a service that sends when the test says so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import select, update

from app import db
from app.db.tables import WebhookDelivery
from app.main import create_app
from app.settings import Settings
from app.webhooks.delivery import Courier
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
def cancelled_job(customer: TestClient, endpoint: dict[str, Any], job_body: dict[str, Any]) -> str:
    """A job that ended after the endpoint was made."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
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


@pytest.fixture
def closed_port() -> Iterator[int]:
    """One that is taken, so that nobody else can listen there, and where connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
