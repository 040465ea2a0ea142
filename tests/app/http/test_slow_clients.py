"""Uploads that stop, and uploads without an end: answered, cut off, and no thread waits for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import repeat
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'


@pytest.fixture
def connection(url: str, customer: TestClient) -> Iterator[socket.socket]:
    """An upload that has begun."""
    place, key = urlsplit(url), customer.headers["authorization"]
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=10) as found:
        headers = {"host": "x", "authorization": key, "content-type": "multipart/form-data; boundary=b"}
        lines = ["POST /v1/files HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), ""]
        found.sendall("\r\n".join(lines).encode())
        yield found


def send(connection: socket.socket, *chunks: bytes) -> None:
    for chunk in chunks:
        connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))


def test_a_body_that_does_not_come_is_not_waited_for(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.deps.BODY_WAIT_S", 0.3)
    connection.sendall(b"content-length: 1000\r\n\r\n" + PART)
    answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()


def test_a_body_without_an_end_is_cut_off(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.deps._DRAIN_BYTES", 1 << 20)
    connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
    with pytest.raises(ConnectionError):
        send(connection, PART, *repeat(b"a" * (1 << 16), 1 << 14))
