"""What holds of a transaction and of the database's clock, on both databases."""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError
from sqlalchemy.orm import Session

from app.db import make_engine, now, read, timestamp, transaction, why
from app.db.tables import Project


def test_a_block_that_ends_well_is_committed(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
    with read(engine) as session:
        assert session.get(Project, "org-1")


def test_a_block_that_raises_is_rolled_back(engine: Engine) -> None:
    with suppress(ZeroDivisionError), transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
        session.flush()
        _ = 1 / 0
    with read(engine) as session:
        assert session.get(Project, "org-1") is None


def test_what_a_reader_changes_is_not_kept(engine: Engine) -> None:
    with suppress(InternalError), read(engine) as session:  # PostgreSQL refuses it at once
        session.add(Project(id="org-1", name="one"))
        session.flush()
    with read(engine) as session:
        assert session.get(Project, "org-1") is None


def test_rows_stay_readable_after_the_commit(engine: Engine) -> None:
    with transaction(engine) as session:
        project = Project(id="org-1", name="one")
        session.add(project)
    assert project.name == "one"


def test_times_come_back_aware(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
    with read(engine) as session:
        assert session.scalars(select(Project.created_at)).one().tzinfo == UTC


def test_the_database_tells_unix_seconds(engine: Engine) -> None:
    before = time.time()
    with read(engine) as session:
        told = session.scalars(select(now())).one()
    assert before - 1 <= told <= time.time() + 1


def test_the_database_tells_a_time_that_can_be_stored(engine: Engine) -> None:
    before, slack = datetime.now(UTC), timedelta(seconds=1)
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
        session.execute(update(Project).values(created_at=timestamp()))
    with read(engine) as session:
        stored = session.scalars(select(Project.created_at)).one()
    assert before - slack <= stored <= datetime.now(UTC) + slack


def test_the_clock_moves_on_within_a_transaction(engine: Engine) -> None:
    with read(engine) as session:
        first = session.scalars(select(now())).one()
        time.sleep(0.01)
        assert session.scalars(select(now())).one() > first


def test_writers_that_read_first_wait_for_each_other(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name=""))
    barrier = Barrier(8)

    def append(_: int) -> None:
        barrier.wait()
        for _turn in range(5):
            with transaction(engine) as session:
                project = session.scalars(select(Project).with_for_update()).one()
                project.name += "x"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append, range(8)))
    with read(engine) as session:
        assert session.scalar(select(func.length(Project.name))) == 40


def test_a_reader_does_not_wait_for_a_writer(engine: Engine) -> None:
    with transaction(engine) as writer:
        writer.add(Project(id="org-1", name="one"))
        writer.flush()
        with read(engine) as session:
            assert session.scalars(select(Project)).all() == []


def test_sqlite_keeps_foreign_keys_and_a_log(sqlite_url: str) -> None:
    engine = make_engine(sqlite_url)
    with engine.connect() as connection:
        answers = [
            connection.scalar(text(f"PRAGMA {name}")) for name in ("foreign_keys", "journal_mode", "synchronous")
        ]
    assert answers == [1, "wal", 2]
    engine.dispose()


def test_postgres_ends_a_session_that_sleeps_in_a_transaction(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    with engine.connect() as connection:
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "TimeZone")
        assert [connection.scalar(text(f"SHOW {name}")) for name in names] == ["30s", "5s", "10s", "UTC"]
    engine.dispose()


def test_a_lost_connection_is_replaced(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    with engine.connect() as connection, pytest.raises(OperationalError):
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    engine.dispose()


def test_plain_postgres_urls_are_understood(postgres_url: str) -> None:
    engine = make_engine(postgres_url.replace("postgresql+psycopg://", "postgresql://"))
    assert engine.dialect.driver == "psycopg"


def test_a_server_that_takes_no_writes_is_no_database_of_ours(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        name = connection.scalar(text("SELECT current_database()"))
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    engine.dispose()
    with pytest.raises(OperationalError, match="read-only"):
        engine.connect()


def test_an_error_of_the_database_does_not_show_what_was_to_be_written(engine: Engine) -> None:
    with pytest.raises(IntegrityError) as raised, transaction(engine) as session:
        session.add_all([Project(id="org-1", name="one"), Project(id="org-1", name="a secret")])
    assert "a secret" not in str(raised.value)


def test_the_log_says_why_a_database_does_not_answer_and_quotes_no_value() -> None:
    full, quoting = sqlite3.OperationalError("database or disk is full"), Exception("invalid text: 'secret'")
    assert why(OperationalError("INSERT", {}, full)) == "OperationalError: database or disk is full"
    assert why(InternalError("INSERT", {}, quoting)) == "InternalError"
    assert why(OperationalError("INSERT", {}, Exception())) == "OperationalError"


def test_a_session_that_the_server_ended_is_as_if_it_did_not_answer(postgres_url: str) -> None:
    engine, alive = make_engine(postgres_url), text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
    other = engine.connect().execution_options(isolation_level="AUTOCOMMIT")  # it sees what is there now
    with other, Session(engine) as session:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        session.execute(text("SET idle_in_transaction_session_timeout = '10ms'"))
        while other.scalar(alive, {"pid": pid}):
            time.sleep(0.01)
        with pytest.raises(OperationalError):
            session.execute(text("SELECT 1"))
    engine.dispose()
