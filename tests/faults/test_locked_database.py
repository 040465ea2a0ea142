"""A backup holds SQLite's write lock while a job runs: heartbeats come late, and nothing is lost."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, make_url

from app.db import make_engine
from app.db.tables import JobStatus
from app.signing import signing_key
from app.storage import open_storage
from tests.faults import invariants, sleeper
from tests.faults.storm import CALM
from tests.faults.test_failover import run_worker
from tests.place import Place
from tests.worker.shop import Shop, wait_until
from worker.attempt import Backend

BUSY_MS = 50  # in place of half a minute
REFUSED = 3


@contextmanager
def hold_lock(url: str) -> Iterator[None]:
    """Hold the database's write lock, as a backup or a dump does."""
    with closing(sqlite3.connect(make_url(url).database or "", timeout=600, isolation_level=None)) as backup:
        backup.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            backup.execute("ROLLBACK")


def test_a_job_goes_on_while_a_backup_holds_the_lock(
    sqlite_url: str, local_place: Place, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleeper, "STEP_S", 0.1)
    shop, refused = Shop(tmp_path / "data", sqlite_url, local_place, model), list[str]()
    settings = shop.settings(**CALM)
    key = signing_key(settings)
    engine = make_engine(sqlite_url)
    backend = Backend(settings, engine, open_storage(settings.storage()), key)

    def wait_briefly(connection: Any, record: Any) -> None:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")

    event.listen(engine, "connect", wait_briefly)
    event.listen(engine, "handle_error", lambda context: refused.append(str(context.original_exception)))
    jobs = list[str]()
    with run_worker(backend, shop):
        while not refused:
            jobs.append(shop.add_job())
            wait_until(lambda: shop.job(jobs[-1]).status != JobStatus.queued)
            with hold_lock(sqlite_url):
                if shop.job(jobs[-1]).status == JobStatus.running:
                    wait_until(lambda: len(refused) >= REFUSED)
        ended = [shop.until_ended(job_id) for job_id in jobs]
    assert {(job.status, job.attempt, job.lease_token) for job in ended} == {(JobStatus.succeeded, 1, 1)}
    assert set(refused) == {"database is locked"}
    invariants.check(shop, jobs)
    shop.engine.dispose()
