"""PostgreSQL behind a pooler that gives each transaction another of its connections, as PgBouncer does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, select, text

from app.commands.doctor.machine import database
from app.db import (
    is_pooled,
    look,
    make_engine,
    provider_transaction,
    read,
    schema_state,
    session_faults,
    transaction,
    upgrade_schema,
)
from app.db.prepared import PreparedStatement
from app.db.session import transaction_faults
from app.db.tables import Project
from app.errors import Unfit
from app.ops import preflight
from app.settings import Settings
from tests.pooler import pool_transactions

SETTINGS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "TimeZone")
ASKED = ["30s", "5s", "10s", "UTC"]


@pytest.fixture(params=[False, True], ids=["options refused", "options ignored"])
def pooled_url(request: pytest.FixtureRequest, postgres_url: str) -> Iterator[str]:
    with pool_transactions(postgres_url, ignores_options=request.param) as url:
        yield url


@pytest.fixture
def pooled_engine(pooled_url: str) -> Iterator[Engine]:
    engine = make_engine(pooled_url)
    yield engine
    engine.dispose()


def test_each_transaction_has_its_timeouts(pooled_engine: Engine) -> None:
    for opened in (read, transaction, provider_transaction):
        for _ in range(3):
            with opened(pooled_engine) as session:
                assert [session.scalar(text(f"SHOW {name}")) for name in SETTINGS] == ASKED
    with look(pooled_engine) as connection:
        assert [connection.scalar(text(f"SHOW {name}")) for name in SETTINGS] == ASKED


def test_no_setting_is_left_to_others_on_the_server_s_connections(pooled_engine: Engine, pooled_url: str) -> None:
    with transaction(pooled_engine) as session:
        session.execute(text("SELECT 1"))
    with pooled_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert {connection.scalar(text("SHOW statement_timeout")) for _ in range(4)} == {"0"}


def test_statements_that_are_repeated_are_not_prepared(pooled_engine: Engine) -> None:
    names = PreparedStatement(select(Project.name).where(Project.id == "org-1"), list)
    for number in range(12):  # psycopg would prepare what is asked six times
        with transaction(pooled_engine) as session:
            session.execute(text("SELECT :number + 1"), {"number": number})
        with read(pooled_engine) as session:
            names.all(session)
            assert session.scalar(text("SELECT count(*) FROM pg_prepared_statements")) == 0


def test_a_schema_is_made_through_it(empty_postgres_url: str) -> None:
    with pool_transactions(empty_postgres_url) as url:
        upgrade_schema(url)
        engine = make_engine(url)
        assert schema_state(engine) == "current"
        engine.dispose()


def test_the_doctor_tells_of_a_pooler(pooled_url: str, postgres_url: str) -> None:
    told = {}
    for url in (pooled_url, postgres_url):
        found = {finding.name: finding for finding in database(Settings(database_url=SecretStr(url)))}
        assert found["schema"].state == "ok"
        told[url] = "pooler" in found
    assert told == {pooled_url: True, postgres_url: False}


def test_a_server_asked_directly_keeps_its_session_s_settings(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    assert not is_pooled(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert [connection.scalar(text(f"SHOW {name}")) for name in SETTINGS] == ASKED
    engine.dispose()


def test_a_database_that_does_not_take_the_timeouts_is_refused(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.db.session_faults", lambda engine: ["lock_timeout is 0, not 5s"])
    with pytest.raises(Unfit, match="lock_timeout is 0, not 5s"):
        preflight.schema_state(Settings(database_url=SecretStr(postgres_url)))


def test_what_a_transaction_lacks_is_named(postgres_url: str) -> None:
    engine = make_engine(postgres_url)
    assert session_faults(engine) == []
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        assert transaction_faults(connection) == ["lock_timeout is 1s, not 5s"]
    engine.dispose()
