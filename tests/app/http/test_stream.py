"""A job can be followed live, and a client that was cut off goes on where it was."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from app import db, keys
from app.db.tables import ApiKey, JobEvent
from app.jobs import stream
from tests.app.http.conftest import JOBS, Service

PATIENCE_S = 120.0
ERRORS = {401: "authentication_error", 403: "permission_error"}

Events = list[dict[str, Any]]


@pytest.fixture
def job(customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job that was cancelled: four events in all."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    return job_id


def follow(client: TestClient, job: str, last: str | None = None) -> Events:
    headers = {} if last is None else {"last-event-id": last}
    got = client.get(f"{JOBS}/{job}/stream", headers=headers)
    assert got.headers["content-type"].startswith("text/event-stream")
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in got.text.strip().split("\n\n")]
    return [block | {"data": json.loads(block["data"])} for block in blocks]


def test_all_events_come_in_order_and_the_end_last(customer: TestClient, job: str) -> None:
    *events, done = follow(customer, job)
    listed = customer.get(f"{JOBS}/{job}/events").json()["data"]
    assert [event["data"] for event in events] == listed[::-1]
    assert [event["id"] for event in events] == ["1", "2", "3", "4"]
    assert (done["event"], done["data"]) == (
        "done",
        customer.get(f"{JOBS}/{job}").json() | {"safety": done["data"]["safety"]},
    )


def test_a_client_goes_on_after_the_last_event_it_saw(customer: TestClient, job: str) -> None:
    assert [event.get("id") for event in follow(customer, job, "2")] == ["3", "4", None]


@pytest.mark.parametrize("last", ["", "x", "-1"])
def test_a_number_that_is_none_begins_anew(customer: TestClient, job: str, last: str) -> None:
    assert len(follow(customer, job, last)) == 5


@pytest.mark.parametrize("last", ["5", "99999999", "9" * 18])
def test_a_number_that_the_job_has_not_come_to_is_refused(customer: TestClient, job: str, last: str) -> None:
    got = customer.get(f"{JOBS}/{job}/stream", headers={"last-event-id": last})
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_cursor")
    assert got.json()["error"]["param"] == "Last-Event-ID"


def test_a_long_history_comes_whole(customer: TestClient, service: Service, job: str) -> None:
    with db.transaction(service.app.state.engine) as session:
        session.add_all(
            JobEvent(job_id=job, seq=seq, level="info", type="message", message=str(seq), data=None)
            for seq in range(5, 1300)
        )
    *events, done = follow(customer, job)
    assert [event["id"] for event in events] == [str(seq) for seq in range(1, 1300)]
    assert done["event"] == "done"


class Reader(Thread):
    """A client that follows a job, and keeps what it was sent."""

    def __init__(self, url: str, client: TestClient, job: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(daemon=True)
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
        sent = headers or {"authorization": client.headers["authorization"]}
        self._connection.request("GET", f"{JOBS}/{job}/stream", headers=sent)
        self._answer = self._connection.getresponse()
        self.status, self.text = self._answer.status, ""
        self.start()

    def run(self) -> None:
        with suppress(OSError, ValueError, AttributeError):  # it is hung up on while it reads
            while line := self._answer.readline():
                self.text += line.decode()

    def await_text(self, wanted: str) -> None:
        wait_until(lambda: wanted in self.text)

    def leave(self) -> None:
        with suppress(OSError, AttributeError):  # it may have ended already
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self.join(PATIENCE_S)
        self._answer.close()
        self._connection.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    assert is_so()


@pytest.fixture
def running(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    return job_id


def test_many_streams_cost_one_query_at_a_time(
    url: str, customer: TestClient, service: Service, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, asked = [0], [0]
    look = stream.read_news

    def count_looks(*arguments: Any) -> Any:
        looks[0] += 1
        return look(*arguments)

    monkeypatch.setattr("app.jobs.stream.read_news", count_looks)
    readers = [Reader(url, customer, running) for _ in range(12)]
    for reader in readers:
        reader.await_text("id: 3\n")

    @event.listens_for(service.app.state.engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        asked[0] += "job_events" in statement

    before = looks[0]
    wait_until(lambda: looks[0] >= before + 5)
    assert asked[0] <= looks[0] - before + 1  # one look may have begun before the count did
    customer.post(f"{JOBS}/{running}/cancel")
    for reader in readers:
        reader.await_text("event: done")
        reader.leave()
    assert {reader.text for reader in readers} == {readers[0].text}


def test_no_connection_and_no_thread_is_held_by_a_stream(
    url: str, customer: TestClient, service: Service, running: str
) -> None:
    readers = [Reader(url, customer, running) for _ in range(60)]  # more than shared threads, and than connections
    assert {reader.status for reader in readers} == {200}
    assert customer.get(f"{JOBS}/{running}").status_code == 200
    wait_until(lambda: service.app.state.engine.pool.checkedout() == 0)
    for reader in readers:
        reader.leave()


def test_a_project_has_only_so_many_streams(
    url: str, customer: TestClient, service: Service, stranger: TestClient, running: str
) -> None:
    service.app.state.settings.streams_at_once = 2
    readers = [Reader(url, customer, running) for _ in range(2)]
    refused = customer.get(f"{JOBS}/{running}/stream")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
    assert int(refused.headers["retry-after"]) >= 1
    assert stranger.get(f"{JOBS}/{running}/stream").status_code == 404  # it has a place of its own
    for reader in readers:
        reader.leave()
    wait_until(lambda: not service.app.state.stream_slots._open)


def test_a_quiet_stream_gives_signs_of_life(
    url: str, customer: TestClient, running: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.stream._HEARTBEAT_S", 0.1)
    reader = Reader(url, customer, running)
    reader.await_text("event: heartbeat")
    reader.leave()


def test_somebody_elses_job_reads_as_unknown(stranger: TestClient, job: str) -> None:
    got = stranger.get(f"{JOBS}/{job}/stream")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "fine_tune_not_found")


def sign_in(service: Service, key: str) -> TestClient:
    """Return a browser that was signed in with a key."""
    browser = TestClient(service.app)
    browser.portal = service.http.portal
    browser.post("/sign-in", data={"key": key}, follow_redirects=False)
    return browser


def sign_out(service: Service, browser: TestClient) -> None:
    token = keys.form_token(browser.cookies[keys.COOKIE])
    assert browser.post("/sign-out", data={"form_token": token}, follow_redirects=False).status_code == 303


class BrowserReader(Reader):
    """A page that follows a job with its browser's cookie."""

    def __init__(self, url: str, browser: TestClient, job: str) -> None:
        cookie = {"cookie": f"{keys.COOKIE}={browser.cookies[keys.COOKIE]}"}
        super().__init__(url, browser, job, cookie)


def test_a_revoked_key_a_lost_scope_and_a_sign_out_end_streams_with_what_the_next_request_gets(
    url: str, customer: TestClient, service: Service, provider: TestClient, running: str
) -> None:
    others = [service.client("org-customer", "customer", "read") for _ in range(2)]
    browser = sign_in(service, service.add_key("org-customer", "customer"))
    readers = [Reader(url, each, running) for each in (customer, *others)] + [BrowserReader(url, browser, running)]
    for reader in readers:
        reader.await_text("id: 3\n")
    listed = provider.get("/v1/admin/keys", params={"project_id": "org-customer"}).json()["data"]
    revoked, narrowed = [each["id"] for each in listed if each["scopes"] == ["customer", "read"]]

    assert provider.delete(f"/v1/admin/keys/{revoked}").status_code == 200
    with db.transaction(service.app.state.engine) as session:
        session.get_one(ApiKey, narrowed).scopes = ["read"]
    sign_out(service, browser)

    for reader, code in ((readers[1], 401), (readers[2], 403), (readers[3], 401)):
        reader.join(PATIENCE_S)
        *_, last = [block for block in reader.text.strip().split("\n\n") if block]
        assert last.startswith("event: error\n"), last
        assert json.loads(last.split("data: ", 1)[1])["error"]["type"] == ERRORS[code]
    assert readers[0].is_alive()
    for reader in readers:
        reader.leave()


def test_the_poller_sees_an_ended_key_within_two_seconds() -> None:
    assert stream._LOOK_S + stream._LEAST_S < 2
