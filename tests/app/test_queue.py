"""Wake-ups reach the broker after the commit, and nothing depends on it."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, select, update

from app.db import read, transaction
from app.db.base import utc_now
from app.db.tables import IdempotencyKey, Outbox, Project
from app.ops.broker import WAKE, Dispatcher, wake
from app.retention import KEYS_STAY, prune

NOBODY = "redis://127.0.0.1:9/0"


def test_a_wake_up_is_sent_once(engine: Engine, redis_url: str) -> None:
    _wake(engine, "ftjob-1")
    dispatcher = Dispatcher(engine, redis_url)
    assert [dispatcher.send_pending(), dispatcher.send_pending()] == [1, 0]
    assert [message["headers"]["task"] for message in _messages(redis_url)] == [WAKE]


def test_a_message_holds_an_id_in_json_and_nothing_else(engine: Engine, redis_url: str) -> None:
    _wake(engine, "ftjob-1")
    Dispatcher(engine, redis_url).send_pending()
    message = _messages(redis_url)[0]
    assert message["content-type"] == "application/json"
    assert _job_ids(redis_url) == ["ftjob-1"]


def test_a_wake_up_of_a_transaction_that_failed_is_not_sent(engine: Engine, redis_url: str) -> None:
    def fail() -> None:
        with transaction(engine) as session:
            wake(session, "ftjob-1")
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        fail()
    assert Dispatcher(engine, redis_url).send_pending() == 0


def test_without_a_broker_nothing_is_sent(engine: Engine) -> None:
    _wake(engine, "ftjob-1")
    assert Dispatcher(engine, None).send_pending() == 0
    assert _outbox_jobs(engine) == []


def test_what_was_sent_is_pruned_after_a_while(engine: Engine) -> None:
    for job_id in ("old", "late", "unsent"):
        _wake(engine, job_id)
    with transaction(engine) as session:
        for job_id, hours in (("old", 2), ("late", 0)):
            at = utc_now() - timedelta(hours=hours)
            session.execute(update(Outbox).where(Outbox.payload["job_id"].as_string() == job_id).values(sent_at=at))
    prune(partial(transaction, engine))
    assert _outbox_jobs(engine) == ["late", "unsent"]


def test_idempotency_keys_are_kept_for_a_month(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
        session.flush()
        for key, stayed in (("new", KEYS_STAY - timedelta(hours=1)), ("old", KEYS_STAY + timedelta(hours=1))):
            facts = {"project_id": "org-1", "request_hash": "0", "job_id": "ftjob-1"}
            session.add(IdempotencyKey(key=key, created_at=utc_now() - stayed, **facts))
        session.add_all(_many(1001))
    prune(partial(transaction, engine))
    with read(engine) as session:
        assert list(session.scalars(select(IdempotencyKey.key))) == ["new"]


def _many(count: int) -> list[IdempotencyKey]:
    """More than one transaction removes."""
    facts = {"project_id": "org-1", "request_hash": "0", "job_id": "ftjob-1", "created_at": utc_now() - 2 * KEYS_STAY}
    return [IdempotencyKey(key=f"key-{n}", **facts) for n in range(count)]


def _outbox_jobs(engine: Engine) -> list[object]:
    with read(engine) as session:
        return [row.payload["job_id"] for row in session.scalars(select(Outbox).order_by(Outbox.id))]


def test_a_wake_up_waits_for_a_broker_that_is_down(engine: Engine, redis_url: str) -> None:
    _wake(engine, "ftjob-1")
    sent = [Dispatcher(engine, url).send_pending() for url in (NOBODY, redis_url)]
    assert (sent, _job_ids(redis_url)) == ([0, 1], ["ftjob-1"])


def test_wake_ups_are_sent_in_their_order(engine: Engine, redis_url: str) -> None:
    jobs = [f"ftjob-{number}" for number in range(5)]
    for job in jobs:
        _wake(engine, job)
    Dispatcher(engine, redis_url).send_pending()
    assert _job_ids(redis_url) == jobs


def test_two_dispatchers_leave_no_wake_up_unsent(engine: Engine, redis_url: str) -> None:
    jobs = {f"ftjob-{number}" for number in range(20)}
    for job in jobs:
        _wake(engine, job)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: Dispatcher(engine, redis_url).send_pending(), range(2)))
    assert set(_job_ids(redis_url)) == jobs
    with read(engine) as session:
        assert session.scalars(select(Outbox).where(Outbox.sent_at.is_(None))).all() == []


def test_the_dispatcher_s_thread_sends_until_it_is_stopped(engine: Engine, redis_url: str) -> None:
    stop = Event()
    thread = Thread(target=Dispatcher(engine, redis_url).run, args=(stop, 0.01))
    thread.start()
    _wake(engine, "ftjob-1")
    with redis.Redis.from_url(redis_url) as client:
        assert client.brpop(["spard:celery"], timeout=60)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def _wake(engine: Engine, job_id: str) -> None:
    with transaction(engine) as session:
        wake(session, job_id)


def _messages(redis_url: str) -> list[dict[str, Any]]:
    """What stands in the broker's queue, oldest first."""
    with redis.Redis.from_url(redis_url) as client:
        return [json.loads(message) for message in reversed(client.lrange("spard:celery", 0, -1))]


def _job_ids(redis_url: str) -> list[str]:
    bodies = [json.loads(base64.b64decode(message["body"])) for message in _messages(redis_url)]
    return [args[0] for args, _, _ in bodies]
