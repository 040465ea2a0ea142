"""The real application on a database and a storage of the test's own, with a provider and two customers."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from app import db, keys
from app.db.tables import Project
from app.http.connections import BoundedHttp
from app.main import create_app
from app.settings import Settings
from spard.commands import main
from spard.digests import folder_digest

FILES = "/v1/files"
JOBS = "/v1/fine_tuning/jobs"
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # a file of no tensors


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def chat(question: str, answer: str = "four") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def rows(n: int) -> bytes:
    """A training file that is right."""
    return jsonl(*(chat(f"What is {i} and {i}?") for i in range(n)))


def pool(n: int = 100) -> bytes:
    return jsonl(*({"prompt": f"How do I do harm {i}?", "safe": "I cannot help with that."} for i in range(n)))


def benign(n: int = 20) -> bytes:
    """The other side of a pool."""
    return jsonl(*({"prompt": f"How do I bake cake {i}?", "benign": True} for i in range(n)))


def offer(provider: TestClient, folder: Path) -> None:
    """A base model and a safety pool."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NO_WEIGHTS)
    (folder / "calibration").mkdir()
    # A judge that was measured on this model: jobs are warned otherwise.
    error, few = {"language": "en", "may_decide": True}, {"hits": 0, "n": 200, "unscored": 0}
    record: dict[str, Any] = {"judge": "refusal", "base_digest": folder_digest(folder), "gamed": few}
    record["languages"] = [error | {"missed": few, "false_alarms": few}]
    (folder / "calibration" / "judge.json").write_text(json.dumps(record))
    model = {"alias": "lab/tiny-1", "source": str(folder), "learning_rate": 0.002}
    assert provider.post("/v1/admin/models", json=model).status_code == 200
    files = {"file": ("pool.jsonl", pool() + benign())}
    assert provider.post("/v1/admin/pools?name=general", files=files).status_code == 200


@contextmanager
def serve_app(app: FastAPI, **options: Any) -> Iterator[str]:
    """An application that runs already, behind a real server."""
    fixed: dict[str, Any] = {"http": BoundedHttp, "lifespan": "off", "log_config": None}
    fixed["timeout_graceful_shutdown"] = 5
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, **fixed | options))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


@dataclass
class Service:
    """The application, and clients that hold a key to it."""

    app: FastAPI
    http: TestClient

    def add_key(self, project: str, *scopes: str, owner: str | None = None) -> str:
        with db.transaction(self.app.state.engine) as session:
            if session.get(Project, project) is None:
                session.add(Project(id=project, name=project))
                session.flush()
            return keys.create(session, project, "test", list(scopes), owner)[1]

    def client(self, project: str, *scopes: str, owner: str | None = None) -> TestClient:
        """Shares the one running application, and its event loop: a client of its own would start one per request."""
        client = TestClient(self.app)
        client.portal = self.http.portal
        client.headers["authorization"] = f"Bearer {self.add_key(project, *scopes, owner=owner)}"
        return client

    def clients(self, n: int, project: str, *scopes: str) -> list[TestClient]:
        """Return clients with an event loop for each request, as processes beside each other have them."""
        clients = [self.client(project, *scopes) for _ in range(n)]
        for client in clients:
            client.portal = None
        return clients


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url))


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    app = create_app(settings)
    with TestClient(app) as http:
        yield Service(app, http)


@pytest.fixture
def provider(service: Service) -> TestClient:
    return service.client("org-provider", "admin", "customer")


@pytest.fixture
def customer(service: Service) -> TestClient:
    return service.client("org-customer", "customer")


@pytest.fixture
def stranger(service: Service) -> TestClient:
    return service.client("org-stranger", "customer")


Upload = Callable[..., Any]


@pytest.fixture
def upload(customer: TestClient) -> Upload:
    """Send a file as the customer."""

    def send(content: bytes, name: str = "train.jsonl", purpose: str = "fine-tune", **fields: str) -> Any:
        return customer.post(FILES, data={"purpose": purpose, **fields}, files={"file": (name, content)})

    return send


@pytest.fixture
def provider_with_model(provider: TestClient, tmp_path: Path) -> TestClient:
    """A provider with a base model and a safety pool."""
    offer(provider, tmp_path / "model")
    return provider


@pytest.fixture
def job_body(provider_with_model: TestClient, upload: Upload) -> dict[str, Any]:
    """The smallest job that a customer may ask for."""
    return {"model": "lab/tiny-1", "training_file": upload(rows(10)).json()["id"]}


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    """The same application behind a real server."""
    with serve_app(service.app) as url:
        yield url


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def spard(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with whatever key is set; its exit code and what it printed."""
    monkeypatch.setenv("SPARD_BASE_URL", url)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    return run


@pytest.fixture
def run_with_key(spard: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    """Commands of whoever holds a key."""

    def with_key(key: str) -> Run:
        def run(*arguments: str) -> tuple[int, str]:
            monkeypatch.setenv("SPARD_API_KEY", key)
            return spard(*arguments)

        return run

    return with_key


@pytest.fixture
def run(service: Service, spard: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Commands of the provider."""
    monkeypatch.setenv("SPARD_API_KEY", service.add_key("org-provider", "admin", "customer"))
    return spard


@pytest.fixture(params=[-50, 50], ids=["days behind", "days ahead"])
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock of this process wrong, not that of the database."""

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Wrong:
            return cls.fromtimestamp(datetime.now(UTC).timestamp() + request.param * 86_400, UTC)

    monkeypatch.setattr("app.db.base.datetime", Wrong)
