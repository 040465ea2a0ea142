"""Access the database: sessions, its clock, the schema's version, and the tables."""

from __future__ import annotations

from app.db.errors import holds_nul, is_conflict, is_full, is_lock_timeout, is_sqlite_locked, why
from app.db.prepared import Prepared, Reader
from app.db.session import (
    Begin,
    SchemaState,
    brief_lock_waits,
    clock,
    downgrade_schema,
    is_pooled,
    join_transaction,
    limit_lock_waits,
    look,
    make_engine,
    now,
    provider_transaction,
    read,
    rows,
    schema_state,
    session_faults,
    timestamp,
    transaction,
    upgrade_schema,
)

__all__ = [
    "Begin",
    "Prepared",
    "Reader",
    "SchemaState",
    "brief_lock_waits",
    "clock",
    "downgrade_schema",
    "holds_nul",
    "is_conflict",
    "is_full",
    "is_lock_timeout",
    "is_pooled",
    "is_sqlite_locked",
    "join_transaction",
    "limit_lock_waits",
    "look",
    "make_engine",
    "now",
    "provider_transaction",
    "read",
    "rows",
    "schema_state",
    "session_faults",
    "timestamp",
    "transaction",
    "upgrade_schema",
    "why",
]
