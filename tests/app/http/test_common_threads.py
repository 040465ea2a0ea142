"""The threads that all requests share: one project's crowd leaves most of them, and of the connections, to others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import QueuePool

from app.jobs import service
from app.keys import Principal
from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_bulkheads import PATIENCE_S, SHARED_THREADS, over_wire

WANTED = {"model": "lab/tiny-1", "training_file": "file-none"}


class Gate:
    """Where one project's creations of jobs wait until they are let through."""

    def __init__(self, project_id: str) -> None:
        self._project_id = project_id
        self._changed, self._is_open = Condition(), False
        self.waiting = self.most_waiting = 0

    def check(self, look: object, caller: Principal, *others: object) -> None:
        if caller.project_id != self._project_id:
            return
        with self._changed:
            self.waiting += 1
            self.most_waiting = max(self.waiting, self.most_waiting)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open, PATIENCE_S)
            self.waiting -= 1

    def await_waiting(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.waiting >= count, PATIENCE_S)

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate("org-customer")
    monkeypatch.setattr(service, "require_room", found.check)
    yield found
    found.open()


def test_a_crowd_of_one_project_leaves_threads_and_connections_to_others(
    url: str, service: Service, customer: TestClient, stranger: TestClient, gate: Gate
) -> None:
    share = service.app.state.settings.requests_at_once
    pool = service.app.state.engine.pool
    assert isinstance(pool, QueuePool)
    with (
        over_wire(url, customer) as own,
        over_wire(url, stranger) as other,
        ThreadPoolExecutor(SHARED_THREADS + share) as together,
    ):
        assert own.get(JOBS).status_code == 200  # from now on its key is known
        crowd = [together.submit(own.post, JOBS, json=WANTED) for _ in range(SHARED_THREADS + share)]
        gate.await_waiting(share)
        assert other.get(JOBS).status_code == 200
        assert other.post(JOBS, json=WANTED).status_code == 400
        assert pool.checkedout() <= share
        gate.open()
        assert {each.result().status_code for each in crowd} == {400}
    assert gate.most_waiting <= share


def test_two_keys_of_a_project_have_one_part(url: str, service: Service, customer: TestClient, gate: Gate) -> None:
    threads = service.app.state.common_threads
    second = service.client("org-customer", "customer")
    with over_wire(url, customer) as first, over_wire(url, second) as other, ThreadPoolExecutor() as together:
        assert {each.get(JOBS).status_code for each in (first, other)} == {200}
        threads.lane.share = 1
        created = together.submit(first.post, JOBS, json=WANTED)
        gate.await_waiting(1)
        threads.lane.wait_s = 0.0
        refused = other.get(JOBS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_at_once")
        gate.open()
        assert created.result().status_code == 400
