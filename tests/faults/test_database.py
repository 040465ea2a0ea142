"""The database crashes, or a process dies within its transaction: F8, F9 in part, F36."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from app.db import read, transaction
from app.db.tables import TERMINAL, Job, JobStatus
from tests.faults import invariants, sleeper
from tests.faults.conftest import Record
from tests.faults.processes import context
from tests.faults.storm import TIMERS, is_soak
from tests.faults.writer import write_forever
from tests.worker.shop import Shop, wait_until

RECOVERY_S = 300.0  # by then it will not come back
MOST_CRASHES = 30


def test_jobs_go_on_after_the_database_has_crashed(shop: Shop, seed: int, record_property: Record) -> None:
    jobs = [shop.add_job(max_attempts=1000) for _ in range(12)]
    guards, slowest = shop.folder.parent / "guards", 0.0
    values = shop.settings(**TIMERS).model_dump()
    workers = [context().Process(target=sleeper.serve, args=(values, guards, None)) for _ in range(2)]
    for worker in workers:
        worker.start()
    wait_until(lambda: any(shop.job(job_id).status != JobStatus.queued for job_id in jobs))
    rng, wanted = Random(seed), 5 if is_soak() else 2
    for crash in range(MOST_CRASHES):
        if crash >= wanted and _is_noticed(guards):  # a recovery can be shorter than the pause between two statements
            break
        time.sleep(rng.uniform(0.3, 1.0))
        slowest = max(slowest, _crash(shop))
    shop.engine.dispose()
    wait_until(lambda: all(shop.job(job_id).status in TERMINAL for job_id in jobs))
    for worker in workers:
        worker.terminate()
        worker.join()
    invariants.check(shop, jobs)
    assert {shop.job(job_id).status for job_id in jobs} == {JobStatus.succeeded}
    assert _is_noticed(guards), "vacuous: nobody noticed"
    record_property("slowest recovery of the database, s", round(slowest, 2))
    assert slowest < RECOVERY_S


def test_sqlite_survives_writers_that_are_killed(
    sqlite_url: str, tmp_path: Path, seed: int, record_property: Record
) -> None:
    path, rng, kills = tmp_path / "spard.db", Random(seed), 100 if is_soak() else 8
    for _ in range(kills):
        writers = [context().Process(target=write_forever, args=(sqlite_url,)) for _ in range(2)]
        before = _count_committed(path)
        for writer in writers:
            writer.start()
        wait_until(lambda before=before: _count_committed(path) > before)  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.3))
        for writer in writers:
            writer.kill()
            writer.join()
    written = _count_committed(path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT count(*) FROM corpora").fetchone() == (written,)
    record_property("kills", 2 * kills)
    record_property("transactions", written)
    assert written >= kills, "vacuous: hardly anything was written"


def _count_committed(path: Path) -> int:
    """How many rows were committed: they are numbered without a gap."""
    with closing(sqlite3.connect(path, timeout=RECOVERY_S)) as database:
        return int(database.execute("SELECT max(version) FROM corpora").fetchone()[0] or 0)


def _is_noticed(guards: Path) -> bool:
    """Whether a statement of a worker has failed."""
    return "error OperationalError" in sleeper.counts(guards)


def _crash(shop: Shop) -> float:
    """Kill a backend of the server, which makes all of it restart and recover; the seconds until it writes again."""
    with suppress(DBAPIError), read(shop.engine) as session:
        victim = session.scalar(text("SELECT pg_backend_pid()"))
        os.kill(int(victim or 0), signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() < began + RECOVERY_S:
        try:
            with transaction(shop.engine) as session:
                session.execute(update(Job).where(Job.id == "none").values(phase="none"))
            return time.monotonic() - began
        except DBAPIError:
            time.sleep(0.05)
    return RECOVERY_S
