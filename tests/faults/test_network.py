"""The wires to PostgreSQL, Redis and S3 are cut, slow or silent: F9-F12, F14-F16, F27 of the table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import redis
from sqlalchemy import select
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.db import make_engine, read, transaction
from app.db.tables import JobStatus, Outbox
from app.ops.broker import Dispatcher, wake
from app.storage import StorageError, open_storage
from tests import servers
from tests.faults import invariants, sleeper
from tests.faults.conftest import Record
from tests.faults.processes import context
from tests.faults.proxy import Mode, Plan, Proxy, proxy
from tests.faults.storm import CALM, TIMERS, is_soak
from tests.place import Place
from tests.worker.shop import Shop, wait_until

LEASE_S = 1.5
UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
HALF = b"HTTP/1.1 2"
EMPTY = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
KEY = "tenants/org-1/files/file-1"
MODES = tuple(mode for mode in get_args(Mode) if mode not in ("open", "refusing"))


@contextmanager
def worker(shop: Shop, database_url: str, clock_s: float = 0.0, lease_s: float = LEASE_S) -> Iterator[BaseProcess]:
    """One in a process of its own, that sees the database at a URL."""
    timers = TIMERS | {"lease_s": lease_s}
    values = shop.settings(**timers).model_dump() | {"database_url": database_url}
    process = context().Process(target=sleeper.serve, args=(values, guards(shop), None, clock_s))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def guards(shop: Shop) -> Path:
    return shop.folder.parent / "guards"


def hurt(wire: Proxy, mode: Mode, rng: Random) -> None:
    """For longer than a lease, and then the end of all connections."""
    wire.mode = mode
    time.sleep(rng.uniform(1.2, 2.5) * LEASE_S)
    wire.mode = "open"
    wire.cut()


def cut_often(wire: Proxy, rng: Random) -> None:
    for _ in range(10):
        time.sleep(rng.uniform(0.01, 0.2))
        wire.cut()


@pytest.mark.parametrize("mode", ["cut", *MODES])
def test_a_worker_behind_a_bad_wire_neither_loses_a_job_nor_ends_it_twice(
    shop: Shop, mode: str, seed: int, record_property: Record
) -> None:
    rounds, rng = 10 if is_soak() else 1, Random(seed)
    with proxy(shop.database_url) as (wire, url), worker(shop, url):
        accepted = [shop.add_job(max_attempts=1000) for _ in range(20 * rounds)]
        wait_until(lambda: any(shop.job(job_id).status == JobStatus.running for job_id in accepted))
        for _ in range(rounds):
            if mode == "cut":
                cut_often(wire, rng)
            else:
                hurt(wire, mode, rng)  # type: ignore[arg-type]
        with worker(shop, shop.database_url):
            ended = [shop.until_ended(job_id) for job_id in accepted]
    invariants.check(shop, accepted)
    counts = sleeper.counts(guards(shop))
    record_property(f"{mode}: bytes swallowed, cuts, guards", (wire.swallowed, wire.cuts, counts))
    assert {job.status for job in ended} == {JobStatus.succeeded}
    assert wire.cuts, "vacuous: nothing was cut"
    assert wire.swallowed or mode in ("cut", "slow"), "vacuous: nothing was lost"


def test_while_one_worker_hears_nothing_another_finishes_its_job(shop: Shop) -> None:
    rounds, accepted = 10 if is_soak() else 1, []
    for _ in range(rounds):
        with proxy(shop.database_url) as (wire, url), worker(shop, url):
            accepted.append(shop.add_job(max_attempts=1000))
            wait_until(lambda: shop.job(accepted[-1]).status == JobStatus.running)
            wire.mode = "silent"
            with worker(shop, shop.database_url, lease_s=CALM["lease_s"]):
                job = shop.until_ended(accepted[-1])
        assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
    invariants.check(shop, accepted)
    assert sleeper.counts(guards(shop))["reaped"] == rounds


def test_clocks_of_workers_that_are_an_hour_wrong_change_nothing(shop: Shop) -> None:
    accepted = [shop.add_job() for _ in range(100 if is_soak() else 10)]
    lease_s = CALM["lease_s"]
    with worker(shop, shop.database_url, 3600.0, lease_s), worker(shop, shop.database_url, -3600.0, lease_s):
        ended = [shop.until_ended(job_id) for job_id in accepted]
    invariants.check(shop, accepted)
    assert {(job.status, job.attempt) for job in ended} == {(JobStatus.succeeded, 1)}
    assert "reaped" not in sleeper.counts(guards(shop))


def test_a_pool_without_a_free_connection_refuses_in_time_and_recovers(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    engine.pool._timeout = 0.2  # type: ignore[attr-defined]  # ten seconds else
    held = [engine.connect() for _ in range(30)]
    with pytest.raises(PoolTimeout):
        engine.connect()
    held.pop().close()
    engine.connect().close()
    for connection in held:
        connection.close()
    engine.dispose()


@pytest.mark.parametrize("_", range(20 if is_soak() else 1))
def test_wake_ups_wait_for_a_broker_that_is_cut_off(shop: Shop, redis_url: str, _: int) -> None:
    with proxy(redis_url) as (wire, url):
        dispatcher = Dispatcher(shop.engine, url)
        announce(shop, "ftjob-1")
        sent = [dispatcher.send_pending()]
        wire.cut()
        announce(shop, "ftjob-2")
        sent.append(dispatcher.send_pending())  # over a new connection
        wire.close()
        announce(shop, "ftjob-3")
        sent.append(dispatcher.send_pending())
    assert sent == [1, 1, 0]
    assert pending(shop) == 1
    assert Dispatcher(shop.engine, redis_url).send_pending() == 1


def test_a_full_broker_costs_no_wake_up(shop: Shop) -> None:
    with servers.redis() as url, redis.Redis.from_url(url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        announce(shop, "ftjob-1")
        while_full = Dispatcher(shop.engine, url).send_pending(), pending(shop)
        client.config_set("maxmemory", "0")
        assert Dispatcher(shop.engine, url).send_pending() == 1
    assert while_full == (0, 1)


def announce(shop: Shop, job_id: str) -> None:
    with transaction(shop.engine) as session:
        wake(session, job_id)


def pending(shop: Shop) -> int:
    with read(shop.engine) as session:
        return len(session.scalars(select(Outbox).where(Outbox.sent_at.is_(None))).all())


def first(times: int, answer: bytes) -> Plan:
    """Refuse so many requests, and let the others pass."""
    left = iter(range(times))
    return lambda request: None if next(left, None) is None else answer


@pytest.mark.parametrize("answer", [UNAVAILABLE, BROKEN])
def test_a_storage_that_refuses_three_times_is_asked_again(moto_place: Place, answer: bytes) -> None:
    with proxy(moto_place.endpoint_url or "", first(3, answer)) as (_, url):
        storage = open_storage(moto_place.url, url)
        assert storage.write(KEY, [b"whole"]).bytes == 5
    assert b"".join(open_storage(moto_place.url, moto_place.endpoint_url).chunks(KEY)) == b"whole"


def test_a_storage_that_sends_nothing_is_not_asked_for_ever(moto_place: Place) -> None:
    asked = []

    def plan(request: bytes) -> bytes | None:
        if not request.startswith(b"GET"):
            return None
        asked.append(request)
        return EMPTY if len(asked) < 100 else None

    open_storage(moto_place.url, moto_place.endpoint_url).write(KEY, [b"whole"])
    with proxy(moto_place.endpoint_url or "", plan) as (_, url), pytest.raises(StorageError, match="broke off 4 times"):
        list(open_storage(moto_place.url, url).chunks(KEY))


def test_an_object_is_whole_or_not_there_whatever_happens_to_requests(
    moto_place: Place, seed: int, record_property: Record
) -> None:
    rng, rounds, told, refused = Random(seed), 100 if is_soak() else 10, {"written": 0, "refused": 0}, []

    def plan(request: bytes) -> bytes | None:
        if rng.random() > 0.4:
            return None
        refused.append(rng.choice((UNAVAILABLE, BROKEN, HALF)))
        return refused[-1]

    straight = open_storage(moto_place.url, moto_place.endpoint_url)
    with proxy(moto_place.endpoint_url or "", plan) as (_, url):
        for i in range(rounds):
            key, content = f"{KEY}-{i}", rng.randbytes(rng.randrange(1, 100_000))
            try:
                open_storage(moto_place.url, url).write(key, [content])
            except StorageError:
                told["refused"] += 1
            else:
                told["written"] += 1
                assert straight.exists(key)
            assert not straight.exists(key) or b"".join(straight.chunks(key)) == content
    record_property("faults, outcomes", (len(refused), told))
    assert len(refused) >= rounds // 5, "vacuous: hardly a request was hurt"
    assert told["written"], "vacuous: nothing was written"


def test_a_storage_that_always_refuses_is_given_up_in_time_and_leaves_nothing(moto_place: Place) -> None:
    asked: list[bytes] = []

    def refuse(request: bytes) -> bytes:
        asked.append(request)
        return UNAVAILABLE

    with proxy(moto_place.endpoint_url or "", refuse) as (_, url), pytest.raises(StorageError):
        open_storage(moto_place.url, url).write(KEY, [b"half"])
    assert len(asked) < 30
    assert not open_storage(moto_place.url, moto_place.endpoint_url).exists(KEY)


def test_nothing_depends_on_listing(moto_place: Place, shop: Shop, model: Path, tmp_path: Path) -> None:
    def refuse_lists(request: bytes) -> bytes | None:
        return BROKEN if b"list-type=2" in request.split(b"\r\n", 1)[0] else None

    with proxy(moto_place.endpoint_url or "", refuse_lists) as (_, url):
        place = Place(moto_place.url, url)
        cloud = Shop(tmp_path / "cloud", shop.database_url, place, model)
        job = cloud.do("crash_once")
        cloud.engine.dispose()
    assert (job.status, job.attempt) == (JobStatus.succeeded, 2)
