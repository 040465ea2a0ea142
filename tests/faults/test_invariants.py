"""What is checked after faults sees the damage that it is there to see."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

import pytest
from sqlalchemy import text

from app.db import transaction
from app.db.tables import JobStatus
from app.jobs import service as jobs
from tests.faults import invariants, sleeper
from tests.faults.mailbox import path
from tests.faults.processes import context
from tests.faults.storm import CALM
from tests.worker.shop import Shop

_QUOTA = "INSERT INTO quotas (tenant_id, max_unfinished_jobs) SELECT tenant_id, 1 FROM jobs LIMIT 1"
_UNLOCK = "ALTER TABLE {table} DISABLE TRIGGER USER"
DAMAGE = {  # what is done to the tables, and what must be said of it
    "a longer time": (("jobs", "UPDATE jobs SET gpu_seconds = gpu_seconds + 3600"), "I7 36.* s counted"),
    "a passed limit": (("quotas", _QUOTA), "I7 2 unfinished jobs where 1 were allowed"),
    "a changed entry": (("audit_log", "UPDATE audit_log SET target = 'nobody' WHERE seq = 2"), "I8 row 2 .* changed"),
    "a lost entry": (
        ("audit_log", "DELETE FROM audit_log WHERE action = 'job.cancelled'"),
        "I8 cancelled without an entry",
    ),
    "a lost event": (
        ("webhook_deliveries", "DELETE FROM webhook_deliveries WHERE type LIKE '%cancelled'"),
        "I10 what is told is not what happened",
    ),
    "an untrue event": (
        ("webhook_deliveries", "UPDATE webhook_deliveries SET type = 'fine_tuning.job.failed'"),
        "I10 what is told is not what happened",
    ),
    "a gap between events": (("job_events", "DELETE FROM job_events WHERE seq = 2"), "I11 a gap"),
    "a repeated event": (
        ("job_events", "UPDATE job_events SET message = 'Step 1/6' WHERE seq IN (2, 3)"),
        "I11 told 2 times: Step 1/6",
    ),
    "a job that is held after its end": (("jobs", "UPDATE jobs SET lease_owner = 'somebody'"), "I11 .* is held"),
    "an event given up": (("webhook_deliveries", "UPDATE webhook_deliveries SET status = 'failed'"), "I10 failed"),
    "an event under another id": (
        ("webhook_deliveries", "UPDATE webhook_deliveries SET event_id = event_id || '0'"),
        "I10 heard otherwise",
    ),
}


@pytest.fixture
def calm(shop: Shop) -> Shop:
    """Two jobs that waited together; one was cancelled, one succeeded."""
    ids = [shop.add_job() for _ in range(2)]
    with transaction(shop.engine) as session:
        jobs.cancel(session, shop.key.project_id, ids[0])
    worker = _worker(shop)
    try:
        assert shop.until_ended(ids[1]).status == JobStatus.succeeded
    finally:
        worker.kill()
        worker.join()
    invariants.check(shop, ids)
    return shop


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_books_are_found_out(calm: Shop, damage: str) -> None:
    (table, statement), said = DAMAGE[damage]
    with transaction(calm.engine) as session:
        session.execute(text(_UNLOCK.format(table=table)))
        session.execute(text(statement))
    with pytest.raises(invariants.Broken, match=said):
        invariants.check(calm, [])


def test_an_event_that_its_receiver_never_took_is_found_out(calm: Shop) -> None:
    heard = path(calm.folder.parent)
    heard.write_text(heard.read_text().replace(" taken", " broken"))
    with pytest.raises(invariants.Broken, match="I10 never arrived"):
        invariants.check(calm, [])


def _worker(shop: Shop) -> BaseProcess:
    values = shop.settings(**CALM).model_dump()
    process = context().Process(target=sleeper.serve, args=(values, shop.folder.parent / "guards", None))
    process.start()
    return process
