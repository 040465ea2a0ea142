"""The fixture, unpacked on this machine: what lay elsewhere is found where it lies now, and nothing else is changed.

The tests beside this know the schema's tables by name here, and only here.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, NullPool, create_engine, text

from tests.legacy.running import Home

FIXTURE = Path(__file__).with_name("fixture.tar.xz")
MODEL = Path("/srv/models/tiny")  # where the old provider kept the base model
MARK = "test/not_trained_again"  # stands in the first step's metrics of jobs that were interrupted


@dataclass(frozen=True)
class Installation:
    """The old installation, and what its makers noted of it."""

    home: Home
    facts: dict[str, Any]
    model: Path

    @property
    def ids(self) -> dict[str, str]:
        ids: dict[str, str] = self.facts["ids"]
        return ids

    @property
    def database_url(self) -> str:
        return self.home.settings.get("SPARD_DATABASE_URL") or f"sqlite:///{self.home.data / 'spard.db'}"


def unpack(folder: Path, kind: str, postgres_url: str | None = None) -> Installation:
    """The installation on SQLite, or on an empty PostgreSQL database, in `folder`."""
    with tarfile.open(FIXTURE) as archive:
        wanted = [entry for entry in archive if entry.name.startswith((f"{kind}/", "model"))]
        archive.extractall(folder, wanted, filter="data")
    root = folder / kind
    (root / "data" / "signing_key.pem").chmod(0o600)
    settings = {}
    if postgres_url is not None:
        settings = {"SPARD_DATABASE_URL": postgres_url, "SPARD_SIGNING_KEY": str(root / "data" / "signing_key.pem")}
    found = Installation(Home(root, settings), json.loads((root / "facts.json").read_text()), folder / "model")
    with _connect(found.database_url) as connection:
        if postgres_url is not None:
            _load(connection, (root / "database.sql").read_text())
        _relocate(connection, str(found.model))
        _reopen_uploads(connection)
        _mark(connection, [found.ids[name] for name in ("paused", "interrupted")])
    return found


def change_endpoints(installation: Installation, old_url: str, new_url: str) -> None:
    """The customer's receiver of events listens somewhere else on this machine, and what waits for it is due."""
    with _connect(installation.database_url) as connection:
        values = {"old": old_url, "new": new_url}
        connection.execute(text("UPDATE webhook_endpoints SET url = replace(url, :old, :new)"), values)
        connection.execute(text("UPDATE webhook_deliveries SET due_at = 0 WHERE status = 'pending'"))


@contextmanager
def _connect(url: str) -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def _load(connection: Connection, dump: str) -> None:
    """Run a whole script, as it stands."""
    with closing(connection.connection.cursor()) as cursor:
        cursor.execute(dump)
        cursor.execute("SET search_path TO public")  # a dump empties it


def _relocate(connection: Connection, model: str) -> None:
    """The model's place in what is still to be done; the database lets no ended job change."""
    is_postgres = connection.dialect.name == "postgresql"
    values = {"old": str(MODEL), "new": model}
    connection.execute(text("UPDATE base_models SET source = replace(source, :old, :new)"), values)
    for column in ("spec", "recipe"):
        moved = f"replace(CAST({column} AS TEXT), :old, :new)"
        value = f"CAST({moved} AS JSON)" if is_postgres else moved
        update = f"UPDATE jobs SET {column} = {value} WHERE finished_at IS NULL"  # noqa: S608 - two fixed names
        connection.execute(text(update), values)


def _reopen_uploads(connection: Connection) -> None:
    """The upgrade comes within the hour in which an upload has to be completed."""
    at = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    connection.execute(
        text("UPDATE uploads SET expires_at = :at WHERE status = 'pending'"), {"at": at.isoformat(" ", "microseconds")}
    )


def _mark(connection: Connection, job_ids: list[str]) -> None:
    """A step that is trained again loses its mark."""
    for job_id in job_ids:
        where = {"id": job_id}
        found = connection.execute(text("SELECT data FROM job_metrics WHERE job_id = :id AND step = 1"), where)
        data = found.scalar_one()
        marked = (json.loads(data) if isinstance(data, str) else data) | {MARK: 1.0}
        update = "UPDATE job_metrics SET data = :data WHERE job_id = :id AND step = 1"
        connection.execute(text(update), where | {"data": json.dumps(marked)})
