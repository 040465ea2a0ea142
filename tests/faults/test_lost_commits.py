"""The answer to one COMMIT of the API is lost on the wire: 503, and asking again gets the truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from app.main import create_app
from app.settings import Settings
from tests.app.http.conftest import FILES, Service, pool, rows
from tests.faults.proxy import Proxy, proxy

POOL = "/v1/admin/pools?name=general"
CONTENT = rows(20)
_WAIT_S = 60.0


class LostAnswer:
    """Lets the COMMIT pass that follows a statement, and swallows the answer; then the connection is cut."""

    def __init__(self) -> None:
        self.wire: Proxy | None = None
        self.times = 0
        self._after: bytes | None = None
        self._is_next = False

    def arm(self, after: bytes) -> None:
        self._after = after

    def plan(self, piece: bytes) -> bytes | None:
        """See what goes to the database; nothing is answered here."""
        if self._after and self._after in piece:
            self._after, self._is_next = None, True
        if self._is_next and b"COMMIT" in piece and self.wire:
            self._is_next = False
            self.times += 1
            self.wire.swallowed, self.wire.mode = 0, "halved"
            Thread(target=self._cut, args=(self.wire,)).start()
        return None

    def _cut(self, wire: Proxy) -> None:
        """Cut once the server has answered, so that the commit is done."""
        deadline = time.monotonic() + _WAIT_S
        while not wire.swallowed and time.monotonic() < deadline:
            time.sleep(0.01)
        wire.cut()
        wire.mode = "open"


@pytest.fixture
def lost_answer() -> LostAnswer:
    return LostAnswer()


@pytest.fixture
def service(postgres_url: str, tmp_path: Path, lost_answer: LostAnswer) -> Iterator[Service]:
    with proxy(postgres_url, lost_answer.plan) as (lost_answer.wire, url):
        app = create_app(Settings(data_dir=tmp_path, database_url=SecretStr(url)))
        yield Service(app, TestClient(app))
        app.state.engine.dispose()


def until_answered(ask: Callable[[], Any]) -> Any:
    """Ask again while the service says that the database is away, as clients do."""
    deadline = time.monotonic() + _WAIT_S
    while (got := ask()).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.05)
    return got


def test_a_completed_upload_has_its_bytes(service: Service, lost_answer: LostAnswer) -> None:
    customer = service.client("org-customer", "customer")
    ask = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": len(CONTENT), "mime_type": "text/jsonl"}
    path = f"/v1/uploads/{customer.post('/v1/uploads', json=ask).json()['id']}"
    part = customer.post(f"{path}/parts", files={"data": ("upload", CONTENT)}).json()["id"]
    lost_answer.arm(b"INSERT INTO files")
    assert customer.post(f"{path}/complete", json={"part_ids": [part]}).status_code == 503
    done = until_answered(lambda: customer.post(f"{path}/complete", json={"part_ids": [part]})).json()
    assert (lost_answer.times, done["status"], done["file"]["status"]) == (1, "completed", "processed")
    assert customer.get(f"{FILES}/{done['file']['id']}/content").content == CONTENT


def test_a_file_that_is_listed_has_its_bytes(service: Service, lost_answer: LostAnswer) -> None:
    customer = service.client("org-customer", "customer")
    lost_answer.arm(b"INSERT INTO files")
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", CONTENT)}}
    assert customer.post(FILES, **form).status_code == 503
    (file,) = until_answered(lambda: customer.get(FILES)).json()["data"]
    assert (lost_answer.times, customer.get(f"{FILES}/{file['id']}/content").content) == (1, CONTENT)


def test_the_current_pool_has_its_bytes(service: Service, lost_answer: LostAnswer) -> None:
    provider = service.client("org-provider", "admin")
    lost_answer.arm(b"INSERT INTO corpora")
    assert provider.post(POOL, files={"file": ("pool.jsonl", pool())}).status_code == 503
    again = until_answered(lambda: provider.post(POOL, files={"file": ("pool.jsonl", pool())})).json()
    assert (lost_answer.times, again["version"]) == (1, 1)
    assert service.app.state.storage.size(f"corpora/{again['id']}") == again["bytes"]
