"""Writes rows to a database until it is killed."""

from __future__ import annotations

from sqlalchemy import text

from app.db import make_engine, transaction

_ROW = text(
    "INSERT INTO corpora (id, kind, name, version, rows, bytes, sha256, storage_key, created_at)"
    " SELECT 'c' || n, 'pool', 'p', n, 0, 0, '', '', '2026-01-01' "
    "FROM (SELECT coalesce(max(version), 0) + 1 AS n FROM corpora)"
)


def write_forever(url: str) -> None:
    """Number the rows without a gap."""
    engine = make_engine(url)
    while True:
        with transaction(engine) as session:
            session.execute(_ROW)
