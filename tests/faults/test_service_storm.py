"""One storm over a whole service: workers, API, PostgreSQL, broker and S3, or SQLite and a disk, hurt while jobs run.

The faults F1-F3, F11, F42-F44 and F46-F49 of the table. In the soak 100 jobs for each kind of deployment; else a few,
for less than half a minute each: a frozen worker alone takes 13 s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
from pydantic import SecretStr

from app import keys
from app.db import transaction
from app.storage import open_storage
from app.webhooks import service as webhooks
from app.webhooks.service import EndpointCreate
from tests import servers
from tests.faults.conftest import Record
from tests.faults.deployment import Deployment
from tests.faults.failover import Failover
from tests.faults.http_customer import HttpCustomer
from tests.faults.lies import LIES, Liar
from tests.faults.mailbox import Mailbox
from tests.faults.proxy import proxy
from tests.faults.service_storm import LEASE_S, TIMERS, Fault, ServiceStorm
from tests.faults.storm import is_soak
from tests.faults.storm_process import FULL
from tests.faults.test_locked_database import hold_lock
from tests.place import Place
from tests.worker.shop import Shop

JOBS, ROUNDS, WORKERS, STREAMS = (100, 6, 3, 200) if is_soak() else (6, 1, 2, 20)


@contextmanager
def storm(shop: Shop, box: Mailbox, seed: int, folder: Path, **settings: Any) -> Iterator[ServiceStorm]:
    """A deployment of a shop, not started yet, with a customer and faults."""
    with transaction(shop.engine) as session:
        webhooks.create(session, shop.key.project_id, EndpointCreate(url=box.url))
        _, secret = keys.create(session, shop.key.project_id, "storm", ["customer"])
    folder.mkdir()
    shared = TIMERS | {"streams_at_once": STREAMS + 1, "webhooks_to_loopback": True}
    environment = {"AWS_ACCESS_KEY_ID": servers.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY}
    site = Deployment(shop, WORKERS, shared | settings, folder, environment)
    yield ServiceStorm(shop, site, HttpCustomer(site.url, secret), seed, STREAMS)
    shop.engine.dispose()


def test_a_service_on_postgresql_redis_and_s3_loses_no_job_in_a_storm(
    postgres_url: str,
    redis_url: str,
    moto_place: Place,
    model: Path,
    box: Mailbox,
    tmp_path: Path,
    seed: int,
    record_property: Record,
) -> None:
    began, liar = time.monotonic(), Liar(open_storage(moto_place.url, moto_place.endpoint_url))
    shop = Shop(tmp_path / "data", postgres_url, moto_place, model)
    with (
        proxy(postgres_url) as (wire, database_url),
        proxy(moto_place.endpoint_url or "", liar.answer) as (_, s3),
        storm(
            shop,
            box,
            seed,
            tmp_path / "storm",
            database_url=SecretStr(database_url),
            s3_endpoint_url=s3,
            broker_url=SecretStr(redis_url),
        ) as service,
    ):
        failover = Failover(wire, postgres_url)

        def fail_over() -> None:
            failover.begin()
            time.sleep(service.rng.uniform(0.0, LEASE_S / 2))
            failover.finish()

        def wipe_broker() -> None:
            with redis.Redis.from_url(redis_url) as client:
                client.flushdb()

        def answer_wrongly(lie: str) -> None:
            before = liar.total[lie]
            liar.begin(lie)
            service.add_job()
            service.run_storm(lambda: liar.total[lie] > before)

        faults: dict[str, Fault] = {"PostgreSQL failed over": fail_over, "Redis wiped": wipe_broker}
        faults |= {f"S3: {lie}": partial(answer_wrongly, lie) for lie in LIES}
        service.later(float("inf"), partial(liar.begin, ""))  # what the API sends is compared when the storm is over
        service.run(JOBS, service.common_faults() | faults, ROUNDS)
    report(service, began, record_property, lies=dict(liar.total))
    assert wire.cuts, "vacuous: no connection to the database was cut"
    assert liar.total.keys() == set(LIES), "vacuous: not each lie was told"


def test_a_service_on_sqlite_and_a_disk_loses_no_job_in_a_storm(
    sqlite_url: str,
    local_place: Place,
    model: Path,
    box: Mailbox,
    tmp_path: Path,
    seed: int,
    record_property: Record,
) -> None:
    began = time.monotonic()
    shop = Shop(tmp_path / "data", sqlite_url, local_place, model)
    with storm(shop, box, seed, tmp_path / "storm") as service:

        def fill_disk() -> None:
            flag = service.site.folder / FULL
            flag.touch()
            service.send_file()
            service.later(service.rng.uniform(0.5, 2.0), partial(flag.unlink, missing_ok=True))

        def hold_backup_lock() -> None:
            with hold_lock(sqlite_url):
                time.sleep(service.rng.uniform(0.2, 2.0) * LEASE_S)

        faults: dict[str, Fault] = {"disk full": fill_disk, "SQLite locked by a backup": hold_backup_lock}
        service.run(JOBS, service.common_faults() | faults, ROUNDS)
    report(service, began, record_property)
    assert service.seen["uploads answered 507"], "vacuous: no disk was full"


def report(service: ServiceStorm, began: float, record_property: Record, **more: object) -> None:
    """Show what was injected and seen; fail where nothing was rescued."""
    record_property("jobs", len(service.accepted))
    record_property("faults", (service.injected.total(), dict(service.injected)))
    record_property("seen", dict(sorted(service.seen.items())) | more)
    record_property("seconds", round(time.monotonic() - began))
    assert service.seen["jobs rescued"], "vacuous: no job was rescued"
