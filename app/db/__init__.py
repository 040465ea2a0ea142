"""The database: sessions, its clock, the schema's version, and the tables."""

from __future__ import annotations

from app.db.errors import holds_nul, is_conflict, why
from app.db.prepared import Prepared, Reader
from app.db.session import (
    Begin,
    SchemaState,
    clock,
    downgrade_schema,
    joined,
    look,
    make_engine,
    now,
    provider_transaction,
    read,
    rows,
    schema_state,
    timestamp,
    transaction,
    upgrade_schema,
)

__all__ = [
    "Begin",
    "Prepared",
    "Reader",
    "SchemaState",
    "clock",
    "downgrade_schema",
    "holds_nul",
    "is_conflict",
    "joined",
    "look",
    "make_engine",
    "now",
    "provider_transaction",
    "read",
    "rows",
    "schema_state",
    "timestamp",
    "transaction",
    "upgrade_schema",
    "why",
]
