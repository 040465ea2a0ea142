"""One project cannot stop the others: what waits for the storage holds neither shared threads nor the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import QueuePool

from app.storage import StorageError
from tests.app.http.conftest import FILES, JOBS, Service, Upload, rows
from tests.app.http.test_results import publish
from tests.spard.parts import byte_tokenizer

PATIENCE_S = 120.0
SHARED_THREADS = 40  # those of anyio


class Stuck:
    """A storage that keeps everybody waiting until it is let go, and then fails."""

    def __init__(self) -> None:
        self._changed, self._is_free, self.waiting = Condition(), False, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._wait

    def presigned_url(self, *ignored: Any) -> None:
        return None

    def _wait(self, *ignored: Any) -> Any:
        with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_free, PATIENCE_S)
        raise StorageError("The storage does not answer.")

    def await_waiting(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.waiting >= count, PATIENCE_S)

    def let_go(self) -> None:
        with self._changed:
            self._is_free = True
            self._changed.notify_all()


@pytest.fixture
def stuck_storage(service: Service) -> Iterator[Stuck]:
    """The service's storage from when a test calls for it: `install` first."""
    found = Stuck()
    yield found
    found.let_go()


@pytest.fixture
def together() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * SHARED_THREADS) as pool:
        yield pool


def install(service: Service, stuck: Stuck) -> None:
    service.app.state.storage = service.app.state.quick_storage = stuck


def over_wire(url: str, client: TestClient) -> httpx2.Client:
    return httpx2.Client(
        base_url=url.removesuffix("/v1"), headers=client.headers, timeout=PATIENCE_S, limits=httpx2.Limits()
    )


def test_reads_that_wait_leave_the_shared_threads_to_others(
    url: str,
    service: Service,
    customer: TestClient,
    stranger: TestClient,
    upload: Upload,
    stuck_storage: Stuck,
    together: ThreadPoolExecutor,
) -> None:
    file_id = upload(rows(10)).json()["id"]
    install(service, stuck_storage)
    service.app.state.lanes.reads.share = SHARED_THREADS + 1
    with over_wire(url, customer) as own, over_wire(url, stranger) as other:
        reads = [together.submit(own.get, f"{FILES}/{file_id}/content") for _ in range(SHARED_THREADS + 1)]
        stuck_storage.await_waiting(SHARED_THREADS + 1)
        assert other.get(JOBS).status_code == 200
        assert own.get(FILES).status_code == 200
        stuck_storage.let_go()
        assert {read.result().status_code for read in reads} == {503}


def test_deletions_that_wait_leave_them_too(
    url: str,
    service: Service,
    customer: TestClient,
    stranger: TestClient,
    upload: Upload,
    stuck_storage: Stuck,
    together: ThreadPoolExecutor,
) -> None:
    files = [upload(rows(1)).json()["id"] for _ in range(SHARED_THREADS + 1)]
    install(service, stuck_storage)
    service.app.state.lanes.writes.share = SHARED_THREADS + 1
    with over_wire(url, customer) as own, over_wire(url, stranger) as other:
        for file_id in files:
            together.submit(own.delete, f"{FILES}/{file_id}")
        stuck_storage.await_waiting(len(files))
        assert other.get(JOBS).status_code == 200
        stuck_storage.let_go()


def test_a_project_reads_only_so_much_at_once(
    url: str,
    service: Service,
    customer: TestClient,
    stranger: TestClient,
    upload: Upload,
    stuck_storage: Stuck,
    together: ThreadPoolExecutor,
) -> None:
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    others = f"{FILES}/{stranger.post(FILES, **form).json()['id']}/content"
    install(service, stuck_storage)
    lane = service.app.state.lanes.reads
    lane.share, lane.wait_s = 2, 0.0
    with over_wire(url, customer) as own, over_wire(url, stranger) as other:
        first = [together.submit(own.get, path) for _ in range(2)]
        stuck_storage.await_waiting(2)
        refused = own.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_at_once")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        theirs = together.submit(other.get, others)
        stuck_storage.await_waiting(3)
        stuck_storage.let_go()
        assert {read.result().status_code for read in (*first, theirs)} == {503}


def test_a_lane_that_all_projects_fill_is_busy(
    url: str,
    service: Service,
    customer: TestClient,
    stranger: TestClient,
    upload: Upload,
    stuck_storage: Stuck,
    together: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.http.lanes._PROJECTS", 1)
    path = f"{FILES}/{upload(rows(10)).json()['id']}/content"
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    others = f"{FILES}/{stranger.post(FILES, **form).json()['id']}/content"
    install(service, stuck_storage)
    lane = service.app.state.lanes.reads
    lane.share, lane.wait_s = 1, 0.0
    with over_wire(url, customer) as own, over_wire(url, stranger) as other:
        first = together.submit(own.get, path)
        stuck_storage.await_waiting(1)
        refused = other.get(others)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        stuck_storage.let_go()
        first.result()


READS = [
    "/v1/files/{file}/content",
    "/v1/files/{file}/preview?model=lab/tiny-1",
    "/v1/files/{file}/validation?model=lab/tiny-1&after_line=0",
    "/v1/fine_tuning/jobs/{job}/adapter",
    "/v1/fine_tuning/jobs/{job}/safety",
    "/v1/fine_tuning/jobs/{job}/safety/selected",
    "/v1/fine_tuning/jobs/{job}/safety/risky_rows",
]


@pytest.mark.parametrize("path", READS)
def test_no_database_connection_is_held_while_the_storage_is_waited_for(
    path: str,
    service: Service,
    customer: TestClient,
    job_body: dict[str, Any],
    stuck_storage: Stuck,
    together: ThreadPoolExecutor,
    tmp_path: Path,
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    names = {"file": job_body["training_file"], "job": customer.post(JOBS, json=job_body).json()["id"]}
    publish(service, "pass")
    install(service, stuck_storage)
    answer = together.submit(customer.get, path.format(**names))
    stuck_storage.await_waiting(1)
    assert _is_free_of_sessions(service, answer)
    stuck_storage.let_go()
    assert answer.result().status_code == 503


def _is_free_of_sessions(service: Service, answer: Future[Any]) -> bool:
    """Whether the pool has every connection back at some moment: others take some, but only for moments."""
    pool, end = service.app.state.engine.pool, time.monotonic() + PATIENCE_S
    assert isinstance(pool, QueuePool)
    while pool.checkedout() and time.monotonic() < end:
        time.sleep(0.01)
    return not pool.checkedout() and not answer.done()
