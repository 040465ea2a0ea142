"""Connections that bring no request: ended in time, and closed first where too many are open."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi.testclient import TestClient

from app.commands.doctor import machine
from app.http import connections
from app.http.connections import UNBOUNDED, Connections
from app.settings import Settings
from tests.app.http.conftest import JOBS, Service, serve_app

PATIENCE_S = 120.0
ROOT = Path(__file__).resolve().parents[3]
DEPLOYED = ["deploy/kubernetes/serving.yaml", "docs/deployment.md", "docs/compatibility.md"]
BEGUN = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"  # a blank line would end the headers
ELSEWHERE = "10.0.0.1"  # whom the server trusts, so that the address of the tests is limited


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def connect(stack: ExitStack, url: str, sent: bytes = BEGUN) -> socket.socket:
    place = urlsplit(url)
    found = stack.enter_context(socket.create_connection((place.hostname or "", place.port or 0), PATIENCE_S))
    found.sendall(sent)
    return found


def read_answer(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while chunk := connection.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


def limit(monkeypatch: pytest.MonkeyPatch, per_address: int | None, descriptors: int = 1024) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", PATIENCE_S)
    monkeypatch.setattr(connections, "get_settings", lambda: Settings(connections_per_address=per_address))
    monkeypatch.setattr(connections, "raise_limit", lambda: descriptors)


def test_headers_that_do_not_end_are_not_waited_for(
    service: Service, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.5)
    url = stack.enter_context(serve_app(service.app))
    head, _, body = read_answer(connect(stack, url)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert read_answer(connect(stack, url, b"")) == b""  # nor is one that says nothing


def test_a_second_request_of_a_connection_has_the_same_deadline(
    service: Service, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect(stack, stack.enter_context(serve_app(service.app)), BEGUN + b"\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    connection.sendall(BEGUN)
    assert b"HTTP/1.1 408" in read_answer(connection)


def test_a_body_that_trickles_is_given_up_on_routes_that_read_json(
    url: str, customer: TestClient, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.http.bodies.WAIT_S", 0.2)
    lines = [f"POST {JOBS} HTTP/1.1", "host: x", f"authorization: {customer.headers['authorization']}"]
    lines += ["content-type: application/json", "content-length: 100", "", "{"]
    answer = read_answer(connect(stack, url, "\r\n".join(lines).encode()))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code": "request_timeout"' in answer


def test_connections_of_an_address_that_wait_longest_make_room(
    service: Service, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, per_address=2)
    url = stack.enter_context(serve_app(service.app, forwarded_allow_ips=ELSEWHERE))
    first, second = (connect(stack, url) for _ in range(2))
    assert httpx2.get(f"{url.removesuffix('/v1')}/healthz", timeout=PATIENCE_S).status_code == 200
    assert read_answer(first) == b""
    second.sendall(b"\r\n")
    assert second.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_proxy_that_is_trusted_may_bring_the_connections_of_many(
    service: Service, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, per_address=1)
    url = stack.enter_context(serve_app(service.app, forwarded_allow_ips="127.0.0.1"))
    both = [connect(stack, url) for _ in range(2)]
    for each in both:
        each.sendall(b"\r\n")
        assert each.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_server_without_descriptors_closes_whoever_waits_and_answers_the_others(
    service: Service, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, per_address=None, descriptors=8)
    url = stack.enter_context(serve_app(service.app))
    for _ in range(40):
        connect(stack, url)
    assert httpx2.get(f"{url.removesuffix('/v1')}/healthz", timeout=PATIENCE_S).status_code == 200


class Open:
    """A connection as the table knows it."""

    def __init__(self) -> None:
        self.is_dropped = False

    def drop(self) -> None:
        self.is_dropped = True


def test_a_connection_on_which_a_request_is_answered_is_never_closed_for_another() -> None:
    table, busy = Connections(10, 1, ELSEWHERE), Open()
    assert table.admit(busy, "1.2.3.4") is None  # type: ignore[arg-type]
    table.note_waiting(busy, "1.2.3.4")  # type: ignore[arg-type]
    table.note_request(busy)  # type: ignore[arg-type]
    refusal = table.admit(Open(), "1.2.3.4")  # type: ignore[arg-type]
    assert refusal is not None
    assert (refusal[0], refusal[2], busy.is_dropped) == (429, "too_many_connections", False)
    assert table.admit(Open(), "1.2.3.5") is None  # type: ignore[arg-type]


def test_a_process_takes_as_many_descriptors_as_the_system_gives() -> None:
    code = (
        "import resource; from app.http.connections import raise_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200)); "
        "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200", "200"]


def test_a_server_without_these_bounds_is_told(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with serve_app(service.app, http="h11") as url:
        root = url.removesuffix("/v1")
        for _ in range(2):
            assert httpx2.get(f"{root}/readyz").json() == {"status": "ready", "warnings": [UNBOUNDED]}
        found = machine.free_port(urlsplit(url).port or 0)
    assert caplog.text.count(UNBOUNDED) == 1
    assert (found.state, "BoundedHttp" in found.cure) == ("problem", True)


def test_a_server_with_them_has_nothing_to_tell(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with serve_app(service.app) as url:
        assert httpx2.get(f"{url.removesuffix('/v1')}/readyz").json() == {"status": "ready"}
        assert machine.free_port(urlsplit(url).port or 0).state == "ok"
    assert UNBOUNDED not in caplog.text


@pytest.mark.parametrize("path", ["Dockerfile", "docker-compose.yml", *DEPLOYED])
def test_what_is_deployed_has_these_bounds(path: str) -> None:
    lines = [line for line in (ROOT / path).read_text().splitlines() if "app.main:checked_app" in line]
    assert lines
    assert all(connections.SERVER in line and "--http" in line for line in lines)
