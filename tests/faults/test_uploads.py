"""Uploads whose connection ends at a random byte, and that are sent again: F33 of the table."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import select

from app import objects
from app.db import read, transaction
from app.db.tables import File, UploadPart
from app.main import create_app
from app.settings import Settings
from tests.app.http.conftest import FILES, Service, rows, serve_app
from tests.faults import api_process
from tests.faults.conftest import Record
from tests.faults.processes import context
from tests.faults.storm import is_soak
from tests.worker.shop import wait_until

UPLOADS = "/v1/uploads"
CONTENT = rows(2_000)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent is thrown away, and the peer is told so


@pytest.fixture
def service(sqlite_url: str, tmp_path: Path) -> Iterator[Service]:
    app = create_app(Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url)))
    yield Service(app, TestClient(app))
    app.state.engine.dispose()


@pytest.fixture
def key(service: Service) -> str:
    return service.add_key("org-customer", "customer")


def cut(url: str, path: str, key: str, form: dict[str, Any], rng: Random) -> bool:
    """Send a part of a request, at least a byte too little; whether the cut was within the file."""
    request = httpx2.Request("POST", url.removesuffix("/v1") + path, headers={"authorization": f"Bearer {key}"}, **form)
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    whole = head.encode() + b"\r\n" + request.read()
    at, where = rng.randrange(1, len(whole)), urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0)) as connection:
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.sendall(whole[:at])
    return at > whole.index(CONTENT[:100])


def stored_files(tmp_path: Path) -> list[Path]:
    """Every object, and whatever else lies beside them."""
    return [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]


def table(service: Service, of: type[Any]) -> list[Any]:
    with read(service.app.state.engine) as session:
        return list(session.scalars(select(of)))


def test_a_file_cut_at_any_byte_is_not_there_and_its_next_sending_is(
    service: Service, key: str, tmp_path: Path, seed: int, record_property: Record
) -> None:
    rng, cuts, within = Random(seed), 100 if is_soak() else 12, 0
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("train.jsonl", CONTENT)}}
    with serve_app(service.app) as url, httpx2.Client(headers={"authorization": f"Bearer {key}"}) as client:
        for _ in range(cuts):
            within += cut(url, FILES, key, form, rng)
            assert client.post(url.removesuffix("/v1") + FILES, **form).json()["status"] == "processed"
    files = table(service, File)
    assert [file.sha256 for file in files] == [sha256(CONTENT).hexdigest()] * cuts
    assert [path.read_bytes() for path in stored_files(tmp_path)] == [CONTENT] * cuts
    record_property("cuts, of them within the file", (cuts, within))
    assert within >= cuts // 2, "vacuous: hardly a file was cut"


def test_a_part_cut_at_any_byte_is_no_part_and_its_next_sending_is(
    service: Service, key: str, tmp_path: Path, seed: int
) -> None:
    rng, cuts, ids = Random(seed), 100 if is_soak() else 12, []
    form: dict[str, Any] = {"files": {"data": ("upload", CONTENT)}}
    ask = {"filename": "train.jsonl", "purpose": "fine-tune", "mime_type": "text/jsonl", "bytes": cuts * len(CONTENT)}
    with serve_app(service.app) as url, httpx2.Client(headers={"authorization": f"Bearer {key}"}) as client:
        base = url.removesuffix("/v1") + UPLOADS
        upload_id = client.post(base, json=ask).json()["id"]
        for _ in range(cuts):
            cut(url, f"{UPLOADS}/{upload_id}/parts", key, form, rng)
            ids.append(client.post(f"{base}/{upload_id}/parts", **form).json()["id"])
    assert {part.id for part in table(service, UploadPart)} == set(ids)
    assert len(stored_files(tmp_path)) == cuts
    done = service.http.post(
        f"{UPLOADS}/{upload_id}/complete", json={"part_ids": ids}, headers={"authorization": f"Bearer {key}"}
    )
    assert done.json()["file"]["bytes"] == cuts * len(CONTENT)
    assert [path.read_bytes() for path in stored_files(tmp_path)] == [CONTENT * cuts]


def test_an_api_that_is_killed_in_an_upload_leaves_no_file_and_its_bytes_are_removed_later(
    service: Service, key: str, sqlite_url: str, tmp_path: Path
) -> None:
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("train.jsonl", CONTENT)}}
    request = httpx2.Request("POST", "http://x" + FILES, headers={"authorization": f"Bearer {key}"}, **form)
    head = f"POST {FILES} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    whole = head.encode() + b"\r\n" + request.read()
    values = {"data_dir": tmp_path, "database_url": sqlite_url}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = context().Process(target=api_process.serve, args=(values, listener))
        api.start()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(whole[: len(whole) // 2])
            wait_until(lambda: bool(stored_files(tmp_path)))  # it writes what has come
            api.kill()
            api.join()
    client = httpx2.Client(headers={"authorization": f"Bearer {key}"})
    with serve_app(service.app) as url, client:
        base = url.removesuffix("/v1") + FILES
        assert client.get(base).json()["data"] == []
        sent = client.post(base, **form).json()
        left = [path for path in stored_files(tmp_path) if path.read_bytes() != CONTENT]
        assert left, "vacuous: nothing was left of the killed upload"
        storage, begin = service.app.state.storage, partial(transaction, service.app.state.engine)
        objects.sweep(storage, begin, writes_stay=timedelta(seconds=-5))  # as a day later
        storage.clear_unfinished(datetime.now(UTC) + timedelta(seconds=5), lambda name: True)
        assert [path.read_bytes() for path in stored_files(tmp_path)] == [CONTENT]
        assert client.get(f"{base}/{sent['id']}/content").content == CONTENT
    assert [file.id for file in table(service, File)] == [sent["id"]]
