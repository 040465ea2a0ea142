"""The database: connections, the only commit, the database's own clock and the schema's version.

SQLite and PostgreSQL behave alike: a writing transaction on SQLite takes the write lock when it begins, so that it can
wait for its turn; one that read first and then wanted to write would fail instead of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, Float, create_engine, event, make_url, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement

from app.base import UtcDateTime

_SQLITE_BUSY_S = 30
_POSTGRES_SESSION = {
    "statement_timeout": "30s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "timezone": "UTC",
}
# A silent wire is given up after a minute, whether we wait for an answer or for what we sent to be taken.
_POSTGRES_KEEPALIVE = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_POSTGRES_PATIENCE = _POSTGRES_KEEPALIVE | {"tcp_user_timeout": 60_000}
_MIGRATION_LOCK = 0x5BA2D  # any number that only we use

SchemaState = Literal["current", "behind", "ahead"]


def make_engine(url: str) -> Engine:
    """Connections to `url`, each set up so that nothing waits for ever."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    return _postgres_engine(parsed.set(drivername="postgresql+psycopg"))


@contextmanager
def transaction(engine: Engine, info: dict[str, Any] | None = None) -> Iterator[Session]:
    """A session that commits when the block ends well and rolls back when it does not; `info` goes along with it."""
    with Session(engine, expire_on_commit=False, info=info) as session, session.begin():
        yield session


@contextmanager
def read(engine: Engine) -> Iterator[Session]:
    """A session for looking only: it never commits, and on SQLite it never waits for a writer."""
    with Session(engine.execution_options(read_only=True, postgresql_readonly=True), expire_on_commit=False) as session:
        yield session


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock as Unix seconds; moves on within a transaction."""

    type = Float()
    inherit_cache = True


class timestamp(FunctionElement[datetime]):  # noqa: N801 - likewise
    """The database's clock as a time to store."""

    type = UtcDateTime()
    inherit_cache = True


@compiles(now, "postgresql")
def _now_postgres(element: now, compiler: Any, **kw: Any) -> str:
    return "extract(epoch FROM clock_timestamp())::float8"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(timestamp, "postgresql")
def _timestamp_postgres(element: timestamp, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(timestamp, "sqlite")
def _timestamp_sqlite(element: timestamp, compiler: Any, **kw: Any) -> str:
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


def upgrade_schema(url: str) -> None:
    """Bring the schema to this version; processes that start together do it one after the other."""
    with _migrating(url) as connection:
        command.upgrade(_alembic(connection), "head")


def downgrade_schema(url: str, revision: str = "base") -> None:
    """Take the schema back to an older revision; `base` is an empty database."""
    with _migrating(url) as connection:
        command.downgrade(_alembic(connection), revision)


def schema_state(engine: Engine) -> SchemaState:
    """How the database's schema stands to the one that this version was written for; only looks, locks nothing."""
    scripts = ScriptDirectory.from_config(_alembic(None))
    with engine.execution_options(read_only=True, postgresql_readonly=True).connect() as connection:
        found = set(MigrationContext.configure(connection).get_current_heads())
    if found == set(scripts.get_heads()):
        return "current"
    return "behind" if found <= {script.revision for script in scripts.walk_revisions()} else "ahead"


def _sqlite_engine(url: URL) -> Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": _SQLITE_BUSY_S})

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the driver would begin transactions by itself, and late
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("read_only")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _postgres_engine(url: URL) -> Engine:
    options = " ".join(f"-c {name}={value}" for name, value in _POSTGRES_SESSION.items())
    return create_engine(
        url,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=20,
        pool_timeout=10,
        connect_args={"connect_timeout": 10, "options": options, **_POSTGRES_PATIENCE},
    )


@contextmanager
def _migrating(url: str) -> Iterator[Connection]:
    """One transaction for the whole migration, alone: by SQLite's write lock, or an advisory one on PostgreSQL."""
    engine = make_engine(url)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SET LOCAL lock_timeout = '60s'"))
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            yield connection
    finally:
        engine.dispose()


def _alembic(connection: Connection | None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
