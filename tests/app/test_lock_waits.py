"""SQLite's write lock in another program's hands: a request waits for it once, and jobs keep their leases."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, select
from sqlalchemy.exc import OperationalError

from app.db import is_sqlite_locked, limit_lock_waits, make_engine, read, transaction
from app.db import session as db_session
from app.db.tables import JobStatus, Project
from app.jobs.lease import ReaperRounds, reap_once
from tests.app.conftest import AddJob
from tests.app.parts import claim_next, expire, read_job
from tests.worker.shop import wait_until
from worker.heartbeat import Heart

PATIENCE_S = 120.0


@pytest.fixture
def engine(sqlite_url: str) -> Iterator[Engine]:
    made = make_engine(sqlite_url)
    yield made
    made.dispose()


@contextmanager
def hold_write_lock(engine: Engine) -> Iterator[sqlite3.Connection]:
    """Another program that writes: a backup tool, say."""
    with sqlite3.connect(str(make_url(str(engine.url)).database), isolation_level=None, timeout=PATIENCE_S) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other
        other.execute("ROLLBACK")
    other.close()


def write(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(name="written"))


def test_a_request_waits_for_the_lock_once_however_many_transactions_it_opens(engine: Engine) -> None:
    def wait_twice() -> float:
        limit_lock_waits(0.2)
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(OperationalError) as refused:
                write(engine)
            assert is_sqlite_locked(refused.value)
        return time.monotonic() - began

    with hold_write_lock(engine):
        took_s = copy_context().run(wait_twice)
    assert took_s < db_session.LOCK_WAIT_ALONE_S  # twice that without the limit
    write(engine)


def test_what_is_read_does_not_wait(engine: Engine) -> None:
    with hold_write_lock(engine), read(engine) as session:
        assert session.scalars(select(Project)).all() == []


def test_leases_are_extended_once_the_lock_is_free(
    engine: Engine, add_job: AddJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_session, "LOCK_WAIT_ALONE_S", 0.02)
    job_id, ended = add_job(), list[str]()
    claim = claim_next(engine)
    tries = _counted_tries(monkeypatch)
    with Heart(engine, claim, 0.6, 0.05, lambda: ended.append("child")) as heart:
        with hold_write_lock(engine):
            first = len(tries)
            wait_until(
                lambda: len(tries) > first + 1 and time.monotonic() > tries[first] + 0.6
            )  # the lease has run out
        beaten = read_job(engine, job_id).lease_expires_at
        wait_until(lambda: read_job(engine, job_id).lease_expires_at != beaten)
        assert not heart.lost.is_set()
    assert ended == []


def _counted_tries(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of moments in which a heartbeat was tried; it grows."""
    found, beat = list[float](), Heart.beat

    def count_beat(heart: Heart, *arguments: Any) -> None:
        found.append(time.monotonic())
        beat(heart, *arguments)

    monkeypatch.setattr(Heart, "beat", count_beat)
    return found


def test_nobody_reaps_before_the_workers_could_extend_their_leases(
    engine: Engine, add_job: AddJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_session, "LOCK_WAIT_ALONE_S", 0.05)
    job_id, rounds = add_job(), ReaperRounds()
    claim_next(engine)
    expire(engine, job_id)
    with hold_write_lock(engine), pytest.raises(OperationalError):
        reap_once(engine, rounds)
    assert reap_once(engine, rounds) == []
    assert read_job(engine, job_id).status is JobStatus.running
    assert reap_once(engine, rounds) == [job_id]
