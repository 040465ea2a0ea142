"""`/readyz` says why a process cannot serve, and asks little of what it looks at."""

from __future__ import annotations

import errno
import os
import time
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from fastapi.testclient import TestClient

from app.http.lanes import Lanes
from app.ops.readiness import Saturation
from app.settings import Settings
from tests.app.http.conftest import Service
from tests.app.http.test_bulkheads import Stuck, over_wire


class Counted:
    """A storage that counts how often it is asked."""

    asked = 0

    def exists(self, key: str) -> bool:
        self.asked += 1
        return False


def reason(client: TestClient) -> str:
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"] in ("unavailable", "not_ready")) == (503, True)
    message: str = answer.json()["error"]["message"]
    return message


def test_a_full_disk_is_not_ready(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ops.preflight._MIN_FREE_BYTES", 1 << 62)
    assert "is full" in reason(service.http)


@pytest.mark.parametrize("broken", ["shutil.disk_usage", "pathlib.Path.is_dir"])
def test_a_disk_that_does_not_answer_is_not_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*given: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(broken, fails)
    assert "does not answer: Input/output error." in reason(service.http)


def test_what_was_found_is_kept_for_a_while(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ops.readiness.KEPT_S", 1e9)
    monkeypatch.setattr(service.app.state.readiness, "_storage", storage := Counted())
    assert [service.http.get("/readyz").status_code for _ in range(5)] == [200] * 5
    assert storage.asked == 1


def test_nothing_is_logged_of_it(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert service.http.get("/readyz").status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("alembic")]


def test_a_storage_that_does_not_answer_is_asked_once(
    url: str, service: Service, customer: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()
    monkeypatch.setattr("app.ops.readiness._WAIT_S", 0.05)
    monkeypatch.setattr(service.app.state.readiness, "_storage", stuck)
    with over_wire(url, customer) as client:
        for _ in range(3):
            assert "in time" in client.get("/readyz").json()["error"]["message"]
        stuck.await_waiting(1)
        assert (stuck.waiting, client.get("/healthz").status_code) == (1, 200)
        stuck.let_go()


def test_what_stays_full_is_told_and_what_was_for_a_moment_is_not() -> None:
    saturation = Saturation(Lanes(Settings()))
    for at, full in ((0.0, ["a", "b"]), (3.0, ["a"]), (4.0, ["a", "b"]), (4.9, ["a", "b"])):
        saturation.note(at, full)
    assert saturation.reason(4.9) is None
    assert "a." in (saturation.reason(5.0) or "")
    assert "b" not in (saturation.reason(5.0) or "b")
    saturation.note(6.0, [])
    assert saturation.reason(60.0) is None


def test_threads_that_are_waited_for_and_a_late_event_loop_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.lanes._PROJECTS", 1)
    lanes = Lanes(Settings(reads_at_once=1))
    found: list[list[str]] = []

    async def measure() -> None:
        is_over = anyio.Event()
        async with anyio.create_task_group() as group:
            for project in ("org-1", "org-2"):
                group.start_soon(
                    partial(lanes.reads.project_share(project).run, partial(anyio.from_thread.run, is_over.wait))
                )
            while not lanes.reads.is_full:
                await anyio.sleep(0)
            found.extend(Saturation(lanes)._full(lag_s) for lag_s in (0.0, 9.0))
            is_over.set()

    anyio.run(measure)
    assert found == [["the threads for reads of stored objects"], ["the event loop", *found[0]]]


@pytest.mark.parametrize(("skew_s", "text"), [(7200.0, "+7200 s"), (-90.0, "-90 s")])
def test_a_clock_that_is_not_the_database_s_is_not_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch, skew_s: float, text: str
) -> None:
    right = time.time
    clocks = SimpleNamespace(monotonic=time.monotonic, time=lambda: right() + skew_s)
    monkeypatch.setattr("app.ops.readiness.time", clocks)
    answer = service.http.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "clock_skew")
    assert f"The clock of this machine is {text} from the database's" in answer.json()["error"]["message"]
