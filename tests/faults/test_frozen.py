"""A worker that is stopped for many leases, as with its machine, and goes on: F3 of the table, for long.

Ten minutes at a lease of 90 s are 6.7 leases; here the lease is shorter.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess

import psutil
from sqlalchemy.exc import DBAPIError

from app.db.tables import JobStatus
from tests.faults import invariants, sleeper
from tests.faults.storm import CALM
from tests.faults.test_network import guards, worker
from tests.worker.shop import Shop, wait_until

LEASE_S = 0.3
FROZEN_S = 600 / 90 * LEASE_S


def freeze_at_work(shop: Shop, process: BaseProcess) -> list[str]:
    """Stop a worker while it holds a job and no lock; return that job's id, the last of those that it was given."""
    pid, given = process.pid or 0, list[str]()
    while True:
        job_id = shop.add_job(max_attempts=1000)
        given.append(job_id)
        wait_until(lambda: shop.job(job_id).status != JobStatus.queued)  # noqa: B023 - called in this turn
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        try:
            shop.expire_lease(job_id)
        except DBAPIError:
            is_free = False  # it was stopped within a transaction
        else:
            is_free = True
        if is_free and shop.job(job_id).status == JobStatus.running:
            return given
        os.kill(pid, signal.SIGCONT)


def test_a_worker_that_was_frozen_for_many_leases_gives_up_and_takes_new_jobs(shop: Shop) -> None:
    with worker(shop, shop.database_url, lease_s=LEASE_S) as frozen:
        given = freeze_at_work(shop, frozen)
        job_id = given[-1]
        before = shop.job(job_id).lease_token
        began = time.monotonic()
        with worker(shop, shop.database_url, lease_s=CALM["lease_s"]):
            job = shop.until_ended(job_id)
        time.sleep(max(0.0, began + FROZEN_S - time.monotonic()))
        os.kill(frozen.pid or 0, signal.SIGCONT)
        wait_until(lambda: sleeper.counts(guards(shop)).get("zombie refused", 0) > 0)
        ended = [shop.until_ended(each) for each in given]
        later = shop.until_ended(shop.add_job(max_attempts=1000))
    assert {each.status for each in (*ended, later)} == {JobStatus.succeeded}
    assert job.lease_token > before
    assert shop.job(job_id).adapter == job.adapter
    assert sleeper.ZOMBIE_ACCEPTED not in sleeper.counts(guards(shop))
    invariants.check(shop, [*given, later.id])
