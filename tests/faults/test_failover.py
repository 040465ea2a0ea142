"""PostgreSQL fails over while a worker claims a job, tells that it lives, or publishes: F42 of the table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
from sqlalchemy import event

from app.db import make_engine
from app.db.tables import JobStatus
from app.signing import signing_key
from app.storage import open_storage
from tests.faults import invariants, sleeper
from tests.faults.failover import Failover
from tests.faults.proxy import proxy
from tests.faults.storm import CALM
from tests.faults.test_network import guards
from tests.worker.shop import Shop
from worker.attempt import Backend

MOMENTS = {  # parts of the statement that a worker sends then
    "claim": ("UPDATE jobs SET", "launch_reason="),
    "heartbeat": ("UPDATE jobs SET", "RETURNING jobs.cancel_requested_at"),
    "publication": ("UPDATE jobs SET", "fine_tuned_model="),
}


@contextmanager
def run_worker(backend: Backend, shop: Shop) -> Iterator[None]:
    """A worker in a thread of this process."""
    stop = Event()
    thread = Thread(target=sleeper._serve, args=(backend, stop, guards(shop)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        backend.engine.dispose()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_failover_at_any_moment_costs_no_attempt_and_publishes_once(shop: Shop, moment: str) -> None:
    with proxy(shop.database_url) as (wire, url):
        settings = shop.settings(**CALM)
        storage = open_storage(settings.storage())
        backend = Backend(settings, make_engine(url), storage, signing_key(settings))
        failover, begun = Failover(wire, shop.database_url), Event()
        rest = Thread(target=failover.finish, daemon=True)

        def fail_over(connection: Any, cursor: Any, statement: str, *about: Any) -> None:
            if not begun.is_set() and all(part in statement for part in MOMENTS[moment]):
                failover.begin()  # the statement was done, and its COMMIT will not be heard
                rest.start()
                begun.set()

        event.listen(backend.engine, "after_cursor_execute", fail_over)
        with run_worker(backend, shop):
            job_id = shop.add_job()
            assert begun.wait(600)
            rest.join()
            job = shop.until_ended(job_id)
    assert (job.status, job.attempt, job.lease_token) == (JobStatus.succeeded, 1, 1)
    assert wire.cuts, "vacuous: nothing was cut"
    invariants.check(shop, [job_id])
