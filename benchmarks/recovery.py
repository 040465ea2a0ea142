"""Measure how long work stops after a worker, the database or the broker fails, with the default timers.

    python -m benchmarks.recovery [--rounds 5] [--lease 90]

dead worker     A training worker is killed with SIGKILL while another is idle; the time until the other one has
                started the job. `--lease` sets the lease in seconds.
dead database   A PostgreSQL backend is killed, which restarts the server; the time until the next write is committed.
wiped broker    Redis loses every wake-up message of a job before a Celery worker gets one; the time until the worker
                has started the job by polling.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from pydantic import SecretStr
from sqlalchemy import text, update
from sqlalchemy.exc import DBAPIError

from app.db import read, transaction, upgrade_schema
from app.db.tables import TERMINAL, Job, JobStatus
from app.jobs import transitions
from tests import servers
from tests.place import Place
from tests.spard.parts import write_model
from tests.worker.shop import Shop, wait_until
from tests.worker.test_celery import CELERY

SERVE = "tests.worker.serve"
DATABASE_S = 60.0
_START_S = 300.0  # limit for starting a Celery worker on a busy machine


def main() -> None:
    """Run the three failures, each for `--rounds` rounds, and print how long work stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lease", type=float, default=90.0)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.platform()}, lease {asked.lease:g} s")
    with servers.postgres() as url, servers.redis() as broker, tempfile.TemporaryDirectory() as folder:
        upgrade_schema(url)
        model = write_model(Path(folder) / "tiny")
        shop = Shop(Path(folder) / "data", url, Place(f"file://{folder}/objects"), model)
        shop.timers = {"lease_s": asked.lease, "heartbeat_s": asked.lease / 6}
        _report("dead worker", asked.rounds, lambda: _dead_worker(shop, asked.lease))
        _report("dead database", asked.rounds, lambda: _dead_database(shop))
        _report("wiped broker", asked.rounds, lambda: _wiped_broker(shop, broker))
        shop.engine.dispose()


def _report(name: str, rounds: int, measure: Callable[[], float]) -> None:
    seconds = sorted(measure() for _ in range(rounds))
    print(f"{name}: {', '.join(f'{each:.2f}' for each in seconds)} s, load {os.getloadavg()[0]:.1f}", flush=True)


def _dead_worker(shop: Shop, lease_s: float) -> float:
    first = shop.start(SERVE, "slow")
    job_id = shop.add_job()
    marker = shop.work_dir / "is_slow"
    wait_until(marker.exists)
    marker.unlink()
    with shop.serving("good"):
        began = time.monotonic()
        first.kill()
        wait_until(lambda: shop.job(job_id).lease_token == 2, lease_s + 60)
        seconds = time.monotonic() - began
        shop.until_ended(job_id)
    first.wait()
    return seconds


def _dead_database(shop: Shop) -> float:
    with suppress(DBAPIError), read(shop.engine) as session:
        os.kill(int(session.scalar(text("SELECT pg_backend_pid()")) or 0), signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() < began + DATABASE_S:
        with suppress(DBAPIError):
            with transaction(shop.engine) as session:
                session.execute(update(Job).where(Job.id == "none").values(phase="none"))
            return time.monotonic() - began
        time.sleep(0.05)
    raise SystemExit("the database did not come back")


def _wiped_broker(shop: Shop, broker: str) -> float:
    worker = shop.start(*CELERY, broker_url=SecretStr(broker), warm_child=True)
    try:
        wait_until(lambda: bool(psutil.Process(worker.pid).children()), _START_S)
        time.sleep(3)
        job_id = shop.add_job(waived=True)  # written to the database only: the broker gets no message about it
        began = time.monotonic()
        wait_until(lambda: shop.job(job_id).status != JobStatus.queued, _START_S)
        seconds = time.monotonic() - began
        with transaction(shop.engine) as session:
            transitions.request_cancel(session, job_id)
        wait_until(lambda: shop.job(job_id).status in TERMINAL, _START_S)
        return seconds
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)


if __name__ == "__main__":
    main()
