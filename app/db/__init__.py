"""The database: sessions, its clock, the schema's version, and the tables."""

from __future__ import annotations

from app.db.session import (
    Begin,
    SchemaState,
    downgrade_schema,
    is_conflict,
    make_engine,
    now,
    provider_transaction,
    read,
    schema_state,
    timestamp,
    transaction,
    upgrade_schema,
)

__all__ = [
    "Begin",
    "SchemaState",
    "downgrade_schema",
    "is_conflict",
    "make_engine",
    "now",
    "provider_transaction",
    "read",
    "schema_state",
    "timestamp",
    "transaction",
    "upgrade_schema",
]
