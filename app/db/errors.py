"""Classify database errors by the database's own codes: conflicts, full disks, unavailable servers, and so on.

Each driver has its own classes of errors, so the codes are the common ground.
"""

from __future__ import annotations

from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

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
