"""The disk of the embedded mode fills at each stage: said plainly, nothing is corrupt, and it goes on with room."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import event, make_url

from app.db.tables import JobStatus
from app.main import create_app
from app.ops import preflight
from app.settings import Settings
from app.storage import LocalStorage, StorageFull, local
from tests.app.http.conftest import FILES, Service, rows
from tests.faults import full_disk, invariants
from tests.place import Place
from tests.worker.shop import Shop, at_work, forget_waits, scripted_command, wait_until
from worker.worker import Worker

QUICK: dict[str, Any] = {"gpu_probe_s": 0.1, "outage_patience_s": 3600.0}
FORM: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("train.jsonl", rows(50))}}


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk has no room for objects while this file is there."""
    monkeypatch.setattr(local, "_write_file", local._write_file)  # put back at the end
    full_disk.fill(tmp_path / "flag")
    return tmp_path / "flag"


@pytest.fixture
def service(sqlite_url: str, tmp_path: Path) -> Iterator[Service]:
    app = create_app(Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url)))
    yield Service(app, TestClient(app))
    app.state.engine.dispose()


@pytest.fixture
def sqlite_shop(sqlite_url: str, local_place: Place, model: Path, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path / "data", sqlite_url, local_place, model)
    yield shop
    shop.engine.dispose()


def test_an_upload_that_finds_no_room_is_told_so_and_its_next_sending_is_whole(service: Service, flag: Path) -> None:
    client = service.client("org-customer", "customer")
    flag.touch()
    refused = client.post(FILES, **FORM)
    flag.unlink()
    sent = client.post(FILES, **FORM)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
    assert (sent.status_code, sent.json()["status"]) == (200, "processed")
    assert [each["id"] for each in client.get(FILES).json()["data"]] == [sent.json()["id"]]


def test_a_database_without_room_says_so_and_takes_what_comes_later(service: Service, sqlite_url: str) -> None:
    client, full = service.client("org-customer", "customer"), [False]

    def limit(connection: Any, record: Any, proxy: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {1 if full[0] else 1 << 30}")  # SQLite takes what is there

    event.listen(service.app.state.engine, "checkout", limit)
    first = client.post(FILES, **FORM)
    full[0] = True
    answers = [client.post(FILES, **FORM) for _ in range(1)]
    while answers[-1].status_code == 200:  # pages that are there already are filled first
        answers.append(client.post(FILES, **FORM))
    full[0] = False
    answers.append(client.post(FILES, **FORM))
    kept = [answer.json()["id"] for answer in (first, *answers) if answer.status_code == 200]
    error = answers[-2].json()["error"]
    assert (answers[-2].status_code, error["code"]) == (507, "storage_full")
    assert "disk is full" in error["message"]
    assert answers[-1].status_code == 200
    assert {each["id"] for each in client.get(FILES, params={"limit": 1000}).json()["data"]} == set(kept)
    with sqlite3.connect(make_url(sqlite_url).database or "") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("place", ["selection", "resume state", "adapter"])
def test_a_child_that_finds_no_room_costs_its_job_nothing(
    sqlite_shop: Shop, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, free = shutil.disk_usage, list[int]()
    monkeypatch.setattr(preflight, "_MIN_FREE_BYTES", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=free[0] if free else 1 << 40))
    worker = Worker(sqlite_shop.settings(**QUICK), scripted_command(f"full at the {place}"))
    free.append(0)
    job_id = sqlite_shop.add_job()
    with at_work(worker):
        wait_until(lambda: sqlite_shop.job(job_id).waits == 1)
        seen = sqlite_shop.job(job_id)
        free.clear()
        forget_waits(sqlite_shop)
        job = sqlite_shop.until_ended(job_id)
    assert (seen.status, seen.attempt, seen.error) == (JobStatus.queued, 0, None)
    assert any("the disk of a worker was full" in each for each in sqlite_shop.events(job_id))
    assert (job.status, job.attempt) == (JobStatus.succeeded, 1)
    invariants.check(sqlite_shop, [job_id])


@pytest.mark.parametrize("part", ["/checkpoints/", "adapter.tar.gz", "safety.json"])
def test_a_storage_without_room_is_waited_for(sqlite_shop: Shop, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full, refused = LocalStorage.write, [True], list[str]()

    def write_if_room(self: LocalStorage, key: str, chunks: Any) -> Any:
        if full[0] and part in key:
            refused.append(key)
            raise StorageFull(f"No room is left to store {key}.")
        return write(self, key, chunks)

    monkeypatch.setattr(LocalStorage, "write", write_if_room)
    job_id = sqlite_shop.add_job()
    with sqlite_shop.serving("slow" if part == "/checkpoints/" else "good", **QUICK) as worker:
        wait_until(lambda: len(refused) > 0)
        full[0] = False
        if part == "/checkpoints/":
            worker.end()
            wait_until(lambda: sqlite_shop.job(job_id).status == JobStatus.queued)
            assert sqlite_shop.job(job_id).checkpoint
    with sqlite_shop.serving("good", **QUICK):
        job = sqlite_shop.until_ended(job_id)
    assert (job.status, job.attempt, job.error) == (JobStatus.succeeded, 1, None)
    invariants.check(sqlite_shop, [job_id])
