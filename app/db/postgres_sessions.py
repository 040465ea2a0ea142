"""Set timeouts and the time zone of PostgreSQL sessions, with or without a connection pooler.

A pooler such as PgBouncer in transaction mode runs each transaction on any of the server's connections. Session state
is then lost or, worse, left for another client: settings, prepared statements, session locks, LISTEN. Behind a pooler
the settings are therefore made in each transaction and no statement is prepared; locks are transaction-level
everywhere, and LISTEN is not used.

A pooler is recognized by the process id: it has several server processes, so it cannot report the id of one to a
client.
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
    """Return a sentence for each setting that has another value within a transaction."""
    with engine.connect() as connection:
        return transaction_faults(connection) if connection.dialect.name == "postgresql" else []


def transaction_faults(connection: Connection) -> list[str]:
    """Return the same as `session_faults` for the current transaction of a connection."""
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
