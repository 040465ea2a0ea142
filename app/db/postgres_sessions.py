"""Timeouts and time zone of PostgreSQL sessions, asked directly or through a pooler of connections.

A pooler such as PgBouncer in transaction mode gives each transaction another of the server's connections. What belongs
to a session is then lost or, worse, left to somebody else: settings, prepared statements, locks held by a session,
LISTEN. So behind a pooler the settings are made for each transaction, and no statement is prepared; locks are taken for
a transaction everywhere, and nothing listens.

A pooler is known by its process id: it has several of the server's processes, so it cannot give a client the id of one.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, event, text

_SETTINGS = {
    "statement_timeout": "30s",
    "lock_timeout": "5s",
    "idle_in_transaction_session_timeout": "10s",
    "TimeZone": "UTC",
}
_ROUTED = "is_pooled"  # in the facts that SQLAlchemy keeps of a connection
_FOR_SESSION = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in _SETTINGS.items())
_FOR_TRANSACTION = f"SELECT {_FOR_SESSION.replace('false', 'true')}"
_ASK = text("SELECT " + ", ".join(f"current_setting('{name}')" for name in _SETTINGS))


def keep_settings(engine: Engine) -> None:
    """Give every session of an engine its settings: once if it is the server's own, else in each transaction."""

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
    """Return whether a pooler stands between us and the server; False for SQLite."""
    with engine.connect() as connection:
        return bool(connection.info.get(_ROUTED))


def session_faults(engine: Engine) -> list[str]:
    """Return the settings that do not hold within a transaction, each with what it is and should be."""
    with engine.connect() as connection:
        return transaction_faults(connection) if connection.dialect.name == "postgresql" else []


def transaction_faults(connection: Connection) -> list[str]:
    """Return the same of the transaction of a connection."""
    found = zip(_SETTINGS.items(), connection.execute(_ASK).one(), strict=True)
    return [f"{name} is {value}, not {asked}" for (name, asked), value in found if value != asked]


def _set_up(connection: Any) -> bool:
    """Set up psycopg's connection; return whether a pooler answers on it."""
    connection.autocommit = True
    process = connection.execute("SELECT pg_backend_pid()").fetchone()[0]
    is_through_pooler = bool(process != connection.info.backend_pid)
    if is_through_pooler:
        connection.prepare_threshold = None
    else:
        connection.execute(f"SELECT {_FOR_SESSION}")
    connection.autocommit = False
    return is_through_pooler
