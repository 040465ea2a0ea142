"""Uploads that stop or trickle, and those without an end: answered, cut off, and few threads wait for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count, repeat
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import FILES, Service, rows

PATIENCE_S = 120.0
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'


@pytest.fixture
def connection(url: str, customer: TestClient) -> Iterator[socket.socket]:
    """An upload that has begun."""
    with begin_upload(url, customer) as found:
        yield found


def begin_upload(url: str, client: TestClient) -> socket.socket:
    place, key = urlsplit(url), client.headers["authorization"]
    found = socket.create_connection((place.hostname or "", place.port or 0), timeout=PATIENCE_S)
    headers = {"host": "x", "authorization": key, "content-type": "multipart/form-data; boundary=b"}
    lines = ["POST /v1/files HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), ""]
    found.sendall("\r\n".join(lines).encode())
    return found


def send(connection: socket.socket, *chunks: bytes) -> None:
    for chunk in chunks:
        connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))


def test_a_body_that_does_not_come_is_not_waited_for(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.bodies.WAIT_S", 0.3)
    connection.sendall(b"content-length: 1000\r\n\r\n" + PART)
    answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()


def test_a_body_without_an_end_is_cut_off(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deps._DRAIN_BYTES", 1 << 20)
    connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
    with pytest.raises(ConnectionError):
        send(connection, PART, *repeat(b"a" * (1 << 16), 1 << 14))


def test_a_body_that_trickles_is_not_waited_for(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.bodies.WAIT_S", 0.5)
    connection.sendall(b"content-length: 1000\r\n\r\n" + PART)
    connection.settimeout(0.05)
    answer, end = b"", time.monotonic() + PATIENCE_S
    while not answer and time.monotonic() < end:
        connection.sendall(b"a")
        try:
            answer = connection.recv(65536)
        except TimeoutError:
            continue
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_slow_body_that_brings_enough_arrives(
    connection: socket.socket, customer: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.bodies.LEAST_BYTES", 64)
    monkeypatch.setattr("app.http.bodies.current_time", partial(next, count(0.0, 20.0)))  # each wait is one of 20 s
    connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
    purpose = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    send(connection, purpose, PART)
    for line in rows(10).splitlines(keepends=True):
        send(connection, line)
    send(connection, b"\r\n--b--\r\n", b"")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_project_sends_only_so_many_bodies_at_once(
    url: str, service: Service, customer: TestClient, stranger: TestClient
) -> None:
    service.app.state.settings.uploads_at_once = 2
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    with ExitStack() as stack:

        def one_beside_the_slow() -> Any:
            stack.enter_context(begin_upload(url, customer)).sendall(b"content-length: 1000\r\n\r\n" + PART)
            return customer.post(FILES, **form)

        refused = poll_status(one_beside_the_slow, 429)
        assert refused.json()["error"]["code"] == "too_many_uploads"
        assert int(refused.headers["retry-after"]) >= 1
        assert stranger.post(FILES, **form).status_code == 200
    assert poll_status(lambda: customer.post(FILES, **form), 200).json()["status"] == "processed"


def poll_status(ask: Callable[[], Any], status: int) -> Any:
    """The first answer with this status, or the last one that came in time."""
    end = time.monotonic() + PATIENCE_S
    while (got := ask()).status_code != status and time.monotonic() < end:
        time.sleep(0.05)
    return got
