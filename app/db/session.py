"""Connect to the database: engines, the only commit, the database's clock, the schema's version and kinds of errors.

SQLite and PostgreSQL behave alike: a writing transaction on SQLite takes the write lock when it begins and waits for
it; a transaction that reads first and then wants to write fails at once instead.

Each driver has its own classes of errors, so errors are classified by the database's own codes: conflicts, full disks,
unavailable servers, and so on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Executable,
    Float,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.engine import CursorResult, ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement

from app.db.base import UtcDateTime
from app.db.prepared import Reader

_CLOCK = "clock"  # key in a session's info: the database's time, and when it was read
# A silent connection is dropped after a minute, whether we wait for an answer or for sent data to be acknowledged.
_POSTGRES_KEEPALIVE = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_POSTGRES_PATIENCE = _POSTGRES_KEEPALIVE | {"tcp_user_timeout": 60_000}
_PRIMARY = {"target_session_attrs": "read-write"}  # a standby, as after a failover, counts as no answer
_READ_ONLY = {"read_only": True, "postgresql_readonly": True}
_MIGRATION_LOCK, _PROVIDER_LOCK = 0x5BA2D, 0x5BA2F  # arbitrary numbers that only we use

SchemaState = Literal["current", "behind", "ahead"]
_Rows = CursorResult[*tuple[Any, ...]]
Begin = Callable[[], AbstractContextManager[Session]]  # opens a transaction, for code that waits before it needs one


def make_engine(url: str) -> Engine:
    """Return an engine whose connections have timeouts for everything that they may wait for."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    return _postgres_engine(parsed.set(drivername="postgresql+psycopg"))


@contextmanager
def transaction(engine: Engine, info: dict[str, object] | None = None) -> Iterator[Session]:
    """Open a session that commits at the end of the block and rolls back on an exception.

    `info` becomes the session's `info`; the audit log finds the caller in it.

        with transaction(engine) as session:
            session.add(row)
    """
    with Session(engine, expire_on_commit=False, info=info) as session, session.begin():
        yield session


@contextmanager
def provider_transaction(engine: Engine, info: dict[str, object] | None = None) -> Iterator[Session]:
    """Open a `transaction` that excludes other provider transactions, so that it sees their results.

    A provider's writes depend on existing rows: the next version, a row to replace or create. They are rare and short.
    On SQLite every writer is exclusive anyway.
    """
    with transaction(engine, info) as session:
        if session.get_bind().dialect.name == "postgresql":
            session.execute(select(func.pg_advisory_xact_lock(_PROVIDER_LOCK)))
        yield session


@contextmanager
def read(engine: Engine) -> Iterator[Session]:
    """Open a read-only session; it never commits, and on SQLite never waits for a writer."""
    with Session(engine, expire_on_commit=False) as session:
        session.connection(execution_options=_READ_ONLY)
        yield session


@contextmanager
def look(engine: Engine) -> Iterator[Connection]:
    """Open a read-only connection like `read`, without the ORM's overhead; for `PreparedStatement` and `rows`.

    The rows of `app.jobs.rows` are read this way:

        with look(engine) as connection:
            job = rows.find(connection, project_id, job_id)
    """
    with engine.connect() as connection:
        connection.execution_options(**_READ_ONLY).begin()
        yield connection


def join_transaction(connection: Connection) -> Session:
    """Return an ORM session within the connection's transaction, for a read that needs the ORM."""
    return Session(connection, expire_on_commit=False)


def rows(reader: Reader, statement: Executable, values: Mapping[str, object] | None = None) -> _Rows:
    """Return the rows of a statement of columns in the reader's transaction, without the ORM's overhead.

    As with the ORM, a session's pending changes are flushed first. Use `PreparedStatement` for frequent statements.
    """
    if isinstance(reader, Session):
        reader.flush()
        reader = reader.connection()
    return reader.execute(statement, values)


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock in Unix seconds; it advances within a transaction."""

    type = Float()
    inherit_cache = True


class timestamp(FunctionElement[datetime]):  # noqa: N801 - likewise
    """The database's clock as a time to store in a column."""

    type = UtcDateTime()
    inherit_cache = True


def clock(session: Session) -> datetime:
    """Return the database's time, by which all processes of a deployment decide what has expired.

    The database is queried once per session; after that a monotonic clock advances the time.
    """
    if _CLOCK not in session.info:
        session.info[_CLOCK] = session.scalars(select(timestamp())).one(), time.monotonic()
    found: datetime
    found, at = session.info[_CLOCK]
    return found + timedelta(seconds=time.monotonic() - at)


@compiles(now, "postgresql")
def _now_postgres(element: now, compiler: Any, **kw: Any) -> str:
    # `clock_timestamp`, because `now()` stays at the transaction's start.
    return "extract(epoch FROM clock_timestamp())::float8"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: Any, **kw: Any) -> str:
    # 2440587.5 is the Julian day of the Unix epoch.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(timestamp, "postgresql")
def _timestamp_postgres(element: timestamp, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(timestamp, "sqlite")
def _timestamp_sqlite(element: timestamp, compiler: Any, **kw: Any) -> str:
    # SQLite's clock has milliseconds; SQLAlchemy reads times with six digits.
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


def upgrade_schema(url: str) -> None:
    """Upgrade the schema to this version; processes that start together do so one after another."""
    with _migrating(url) as connection:
        command.upgrade(_alembic(connection), "head")


def downgrade_schema(url: str, revision: str = "base") -> None:
    """Downgrade the schema to an older revision; `base` is an empty database."""
    with _migrating(url) as connection:
        command.downgrade(_alembic(connection), revision)


def schema_state(engine: Engine) -> SchemaState:
    """Compare the database's schema with the one that this version needs, without taking a lock."""
    heads, known = _revisions()
    with engine.execution_options(**_READ_ONLY).connect() as connection:
        is_empty = not inspect(connection).has_table("alembic_version")
        found = set() if is_empty else set(connection.scalars(text("SELECT version_num FROM alembic_version")))
    if found == heads:
        return "current"
    return "behind" if found <= known else "ahead"


@cache
def _revisions() -> tuple[set[str], set[str]]:
    """Return this version's newest revisions, and all its revisions; cached, as alembic reads every migration."""
    scripts = ScriptDirectory.from_config(_alembic(None))
    return set(scripts.get_heads()), {script.revision for script in scripts.walk_revisions()}


def _sqlite_engine(url: URL) -> Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, hide_parameters=True, connect_args={"timeout": LOCK_WAIT_ALONE_S})

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # else the driver begins transactions by itself, and late
        # WAL lets readers work beside the one writer; FULL keeps a commit through a power failure.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("read_only"):  # takes no lock, so no error needs translation
            connection.connection.cursor().execute("BEGIN")
        else:
            with waiting() as most_s:
                connection.connection.cursor().execute(f"PRAGMA busy_timeout = {math.ceil(1000 * most_s)}")
                connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgres_engine(url: URL) -> Engine:
    engine = create_engine(
        url,
        hide_parameters=True,  # errors are logged, and parameters may be customers' texts
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=20,
        pool_timeout=10,
        connect_args={"connect_timeout": 10, **_POSTGRES_PATIENCE, **_PRIMARY},
    )
    keep_settings(engine)
    event.listen(engine, "handle_error", as_away, retval=True)
    return engine


@contextmanager
def _migrating(url: str) -> Iterator[Connection]:
    """Open one exclusive transaction for a migration: SQLite's write lock, or an advisory lock on PostgreSQL."""
    engine = make_engine(url)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                # More patience than a request has, but not endless: a forgotten transaction may hold the lock.
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


# Limit how long one request waits for SQLite's write lock in total, over all transactions it opens.
#
# Another program can hold the lock for minutes, as a backup does. With a limit per transaction alone the waits add
# up: an upload opens four. The limit belongs to the request's task and to the threads that it starts.

LOCK_WAIT_ALONE_S = 30.0  # for one transaction, if no total limit is set


@dataclass
class _Allowance:
    left_s: float


_allowance: ContextVar[_Allowance | None] = ContextVar("lock_waits", default=None)


def limit_lock_waits(seconds: float) -> None:
    """Allow the current task, and tasks and threads started from now on, `seconds` of lock waits in total."""
    _allowance.set(_Allowance(seconds))


@contextmanager
def waiting() -> Iterator[float]:
    """Yield how many seconds the block may wait for the lock, and deduct the time it takes."""
    allowance = _allowance.get()
    if allowance is None:
        yield LOCK_WAIT_ALONE_S
        return
    began = time.monotonic()
    try:
        yield max(allowance.left_s, 0.0)
    finally:
        allowance.left_s -= time.monotonic() - began


@contextmanager
def brief_lock_waits(seconds: float) -> Iterator[None]:
    """Limit the lock waits within the block to `seconds`, instead of the request's limit."""
    token = _allowance.set(_Allowance(seconds))
    try:
        yield
    finally:
        _allowance.reset(token)


# Set timeouts and the time zone of PostgreSQL sessions, with or without a connection pooler.
#
# A pooler such as PgBouncer in transaction mode runs each transaction on any of the server's connections. Session
# state is then lost or, worse, left for another client: settings, prepared statements, session locks, LISTEN. Behind
# a pooler the settings are therefore made in each transaction and no statement is prepared; locks are transaction-
# level everywhere, and LISTEN is not used.
#
# A pooler is recognized by the process id: it has several server processes, so it cannot report the id of one to a
# client.

_SETTINGS = {
    "statement_timeout": "30s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "TimeZone": "UTC",
}
_ROUTED = "is_pooled"  # key in the info that SQLAlchemy keeps per connection
_FOR_SESSION = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SETTINGS.items())
_FOR_TRANSACTION = f"SELECT {_FOR_SESSION.replace('false', 'true')}"
_ASK = text("SELECT " + ", ".join(f"current_setting('{name}')" for name in _SETTINGS))


def keep_settings(engine: Engine) -> None:
    """Apply the settings to every session of an engine: once without a pooler, else in each transaction."""

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        try:
            record.info[_ROUTED] = _set_up(connection)
        except BaseException:
            connection.close()
            raise

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.info.get(_ROUTED):
            connection.exec_driver_sql(_FOR_TRANSACTION)


def is_pooled(engine: Engine) -> bool:
    """Return True if a pooler sits between us and the server; False for SQLite."""
    with engine.connect() as connection:
        return bool(connection.info.get(_ROUTED))


def session_faults(engine: Engine) -> list[str]:
    """Return a sentence for each setting that lacks its intended value within a transaction."""
    with engine.connect() as connection:
        return transaction_faults(connection) if connection.dialect.name == "postgresql" else []


def transaction_faults(connection: Connection) -> list[str]:
    """Return what `session_faults` returns, for the current transaction of a connection."""
    found = zip(_SETTINGS.items(), connection.execute(_ASK).one(), strict=True)
    return [f"{name} is {value}, not {asked}" for (name, asked), value in found if value != asked]


def _set_up(connection: Any) -> bool:
    """Configure a psycopg connection; return True if a pooler answers on it."""
    # Otherwise psycopg opens a transaction, whose rollback undoes the settings.
    connection.autocommit = True
    process = connection.execute("SELECT pg_backend_pid()").fetchone()[0]
    is_through_pooler = bool(process != connection.info.backend_pid)
    if is_through_pooler:
        # A prepared statement belongs to one server connection, and the next transaction may get another one.
        connection.prepare_threshold = None
    else:
        connection.execute(f"SELECT {_FOR_SESSION}")
    connection.autocommit = False
    return is_through_pooler


# Classify errors by the database's own codes.

_WITHOUT_VALUES = (OperationalError, InterfaceError)  # other errors may quote a customer's text
# PostgreSQL: duplicate, missing row, serialization failure, deadlock; below, SQLite's codes for the first two.
_CONFLICTS = {"23505", "23503", "40001", "40P01"}
_CONFLICTS |= {f"SQLITE_CONSTRAINT_{kind}" for kind in ("UNIQUE", "PRIMARYKEY", "FOREIGNKEY")}
_LOCK_NOT_AVAILABLE = "55P03"
# A read-only server, as after a failover; a session ended for idling, or for a transaction that lasted too long.
_AWAY = {"25006", "25P03", "25P04"}
_FULL = {"53100", "SQLITE_FULL"}


def why(error: Exception) -> str:
    """Describe in one line for the log why a database does not answer.

    Only errors that cannot quote a stored value are described in the database's words; for others the class is named.
    """
    words = str(error.orig).strip().splitlines() if isinstance(error, _WITHOUT_VALUES) else []
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def is_conflict(error: DBAPIError) -> bool:
    """Return True if another transaction's rows were in the way, so that a retry may succeed."""
    # psycopg's errors have `sqlstate`, those of SQLite `sqlite_errorname`.
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None)
    return code in _CONFLICTS


def is_full(error: Exception) -> bool:
    """Return True if the database's disk is full."""
    raised = getattr(error, "orig", None)
    return (getattr(raised, "sqlstate", None) or getattr(raised, "sqlite_errorname", None)) in _FULL


def is_lock_timeout(error: DBAPIError) -> bool:
    """Return True if PostgreSQL waited too long for rows that other transactions have locked."""
    return getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE


def is_sqlite_locked(error: Exception) -> bool:
    """Return True if another process held SQLite's write lock longer than the allowed wait."""
    name = getattr(getattr(error, "orig", None), "sqlite_errorname", None)
    return isinstance(name, str) and name.startswith("SQLITE_BUSY")


def holds_nul(error: DBAPIError) -> bool:
    """Return True if a text contained the NUL character, which PostgreSQL's driver refuses and SQLite accepts."""
    return getattr(error.orig, "sqlstate", None) is None and "NUL (0x00)" in str(error.orig)


def as_away(context: ExceptionContext) -> BaseException | None:
    """Return an `OperationalError` if the server is unavailable but reported it as another error; otherwise None.

    A write in a read-only transaction of our own is not converted, because it is our bug.
    """
    error, raised, connection = context.sqlalchemy_exception, context.original_exception, context.connection
    is_ours = connection is not None and connection.get_execution_options().get("read_only")
    if is_ours or not isinstance(error, DBAPIError) or getattr(raised, "sqlstate", None) not in _AWAY:
        return None
    return OperationalError(error.statement, error.params, raised, error.hide_parameters, error.connection_invalidated)
