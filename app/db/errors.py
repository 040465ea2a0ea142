"""Tell database errors apart: a conflict with other rows, a text that cannot be stored, a server that cannot write.

Drivers sort errors into classes of their own; here they are told apart by the database's codes.
"""

from __future__ import annotations

from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

_WITHOUT_VALUES = (OperationalError, InterfaceError)  # others may quote a customer's text
# Of PostgreSQL a duplicate, a row that is gone, a serialization failure, a deadlock; of SQLite the first two.
_CONFLICTS = {"23505", "23503", "40001", "40P01"}
_CONFLICTS |= {f"SQLITE_CONSTRAINT_{kind}" for kind in ("UNIQUE", "PRIMARYKEY", "FOREIGNKEY")}
_LOCK_NOT_AVAILABLE = "55P03"
# A server that only reads, as after a failover; a session that it ended since it slept, or its transaction lasted long.
_AWAY = {"25006", "25P03", "25P04"}
_FULL = {"53100", "SQLITE_FULL"}


def why(error: Exception) -> str:
    """Say in a line for the log why a database does not answer: in its own words where these name no value."""
    words = str(error.orig).strip().splitlines() if isinstance(error, _WITHOUT_VALUES) else []
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


def is_conflict(error: DBAPIError) -> bool:
    """Whether another transaction's rows were in the way: the same request can do better once that has ended."""
    code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None)
    return code in _CONFLICTS


def is_full(error: Exception) -> bool:
    """Return whether the disk of the database has no room for what was written."""
    raised = getattr(error, "orig", None)
    return (getattr(raised, "sqlstate", None) or getattr(raised, "sqlite_errorname", None)) in _FULL


def is_lock_timeout(error: DBAPIError) -> bool:
    """Whether PostgreSQL waited too long for rows that other transactions have locked."""
    return getattr(error.orig, "sqlstate", None) == _LOCK_NOT_AVAILABLE


def is_sqlite_locked(error: Exception) -> bool:
    """Whether another process held SQLite's write lock for as long as was waited."""
    name = getattr(getattr(error, "orig", None), "sqlite_errorname", None)
    return isinstance(name, str) and name.startswith("SQLITE_BUSY")


def holds_nul(error: DBAPIError) -> bool:
    """Whether a text had the NUL character, which PostgreSQL's driver refuses and SQLite takes."""
    return getattr(error.orig, "sqlstate", None) is None and "NUL (0x00)" in str(error.orig)


def as_away(context: ExceptionContext) -> BaseException | None:
    """Return an `OperationalError`, as for a server that does not answer, where one is away in other words.

    A write in a read-only transaction of our own is a fault of ours.
    """
    error, raised, connection = context.sqlalchemy_exception, context.original_exception, context.connection
    is_ours = connection is not None and connection.get_execution_options().get("read_only")
    if is_ours or not isinstance(error, DBAPIError) or getattr(raised, "sqlstate", None) not in _AWAY:
        return None
    return OperationalError(error.statement, error.params, raised, error.hide_parameters, error.connection_invalidated)
