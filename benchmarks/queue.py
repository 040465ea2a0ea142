"""Measure how long workers take to claim a job in a long queue, and when a small project's job is claimed.

Run `python -m benchmarks.queue [JOBS]`. The queue has 50 projects, on PostgreSQL (fsync off) and on SQLite: one project
has a single job, queued last, and another has 99% of all other jobs. Two threads claim and end jobs until the queue is
empty.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from sqlalchemy import Engine, insert

from app import keys
from app.db import make_engine, transaction, upgrade_schema
from app.db.base import new_id, utc_now
from app.db.tables import Job, Project
from app.db.tables.job_records import JobError
from app.jobs import lease
from tests import servers

PROJECTS, THREADS = 50, 2
COLUMNS = ("claims", "twice", "p50 ms", "p99 ms", "all s", "lone is", "load")  # the lone project's job is number ...
_ERROR: JobError = {"code": "server_error", "message": "Nothing is trained here.", "param": None}
Taken = list[tuple[float, str]]  # for each claim its seconds and the job's id


def main() -> None:
    """Fill the queue of each database in turn and print a line for each."""
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(f"{jobs} jobs, {PROJECTS} projects, {THREADS} threads; {platform.platform()}")
    print(f"{'database':12}" + "".join(f"{word:>9}" for word in COLUMNS))
    with servers.postgres() as url:
        _report("postgres", url, jobs)
    with tempfile.TemporaryDirectory() as folder:
        _report("sqlite", f"sqlite:///{Path(folder) / 'queue.db'}", jobs)


def _report(name: str, url: str, jobs: int) -> None:
    upgrade_schema(url)
    with _engine(url) as engine:
        lone = _fill(engine, jobs)
        started = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(_claim_all, [url] * THREADS))
        total_s = time.perf_counter() - started
    times = sorted(seconds for part in parts for seconds, _ in part)
    taken = [job_id for part in parts for _, job_id in part]
    place = min(part.index(found) + 1 for part in parts for found in part if found[1] == lone)
    p50, p99 = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
    twice = len(taken) - len(set(taken))
    load = os.getloadavg()[0]
    print(f"{name:12}{len(taken):9}{twice:9}{p50:9.1f}{p99:9.1f}{total_s:9.1f}{place:9}{load:9.1f}", flush=True)


def _fill(engine: Engine, jobs: int) -> str:
    """Queue all jobs, the single-job project's last, and return the id of that job."""
    few = (jobs - 1) // 100 // (PROJECTS - 2) or 1
    counts = [jobs - 1 - few * (PROJECTS - 2), *[few] * (PROJECTS - 2), 1]
    start = utc_now()
    rows: list[dict[str, object]] = []
    with transaction(engine) as session:
        for i, count in enumerate(counts):
            session.add(Project(id=f"org-{i}", name=str(i)))
            session.flush()
            key, _ = keys.create(session, f"org-{i}", "benchmark", ["customer"])
            rows += [_row(key.project_id, key.id, start + timedelta(seconds=len(rows) + n)) for n in range(count)]
        for at in range(0, len(rows), 1000):
            session.execute(insert(Job), rows[at : at + 1000])
    return str(rows[-1]["id"])


def _row(project_id: str, key_id: str, created_at: object) -> dict[str, object]:
    asked = {"model": "tiny", "training_file": "file-1", "recipe": {}, "spec": {}, "request_hash": "0"}
    return {"id": new_id("ftjob-"), "project_id": project_id, "key_id": key_id, "created_at": created_at, **asked}


def _claim_all(url: str) -> Taken:
    taken = Taken()
    with _engine(url) as engine:
        while True:
            started = time.perf_counter()
            with transaction(engine) as session:
                claim = lease.claim(session, "benchmark", 3600)
            if claim is None:
                return taken
            taken.append((time.perf_counter() - started, claim.job_id))
            with transaction(engine) as session:
                lease.fail(session, claim, _ERROR)


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    engine = make_engine(url)
    yield engine
    engine.dispose()


if __name__ == "__main__":
    main()
