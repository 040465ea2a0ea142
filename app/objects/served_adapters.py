"""Track adapters on inference servers that are not ours: recorded before loading, condemned when withdrawn.

They are condemned in the transaction that erases, pauses or revokes a model. An API process that knows the server then
unloads them, removes their files and deletes the row.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.orm import Session

from app.db import Begin, timestamp
from app.db.tables import ServedAdapter
from app.errors import Unavailable

_LOOK_S = 0.1


def note_adapter(
    session: Session, *, server: str, sha256: str, project_id: str, job_id: str, model: str, base: str
) -> None:
    """Record that a server is about to load an adapter; a condemned adapter is released again."""
    facts = {"project_id": project_id, "job_id": job_id, "model": model, "base": base}
    # Locked: a process that unloads condemned adapters may be about to drop the row.
    if row := session.get(ServedAdapter, (server, sha256), with_for_update=True):
        row.condemned_at, row.model = None, model
    else:
        session.add(ServedAdapter(server=server, sha256=sha256, **facts))


def condemn_job(session: Session, job_id: str, sha256: str | None = None) -> None:
    """Condemn a job's adapters on all servers; with `sha256`, only that adapter."""
    is_it = ServedAdapter.job_id == job_id
    _condemn(session, is_it if sha256 is None else is_it & (ServedAdapter.sha256 == sha256))


def condemn_models(session: Session, names: Collection[str]) -> None:
    """Condemn the adapters of these models, and of models trained on them, on all servers."""
    if names:
        _condemn(session, or_(ServedAdapter.model.in_(names), ServedAdapter.base.in_(names)))


def list_adapters(session: Session, server: str, *, is_condemned: bool) -> Sequence[ServedAdapter]:
    """Return the adapters of a server that must be unloaded (`is_condemned`), or those that may answer."""
    when = ServedAdapter.condemned_at.is_not(None) if is_condemned else ServedAdapter.condemned_at.is_(None)
    return session.scalars(select(ServedAdapter).where(ServedAdapter.server == server, when)).all()


def drop_row(session: Session, server: str, sha256: str) -> None:
    """Delete the row of an adapter that its server has unloaded, unless it was released again meanwhile."""
    is_it = (ServedAdapter.server == server) & (ServedAdapter.sha256 == sha256)
    session.execute(delete(ServedAdapter).where(is_it, ServedAdapter.condemned_at.is_not(None)))


def require_unloaded(begin: Begin, job_id: str, patience_s: float = 10.0) -> None:
    """Wait until no server holds a condemned adapter of a job; raise `Unavailable` after `patience_s` seconds."""
    end = time.monotonic() + patience_s
    condemned = select(ServedAdapter.server).where(
        ServedAdapter.job_id == job_id, ServedAdapter.condemned_at.is_not(None)
    )
    while True:
        with begin() as session:
            server = session.scalar(condemned.limit(1))
        if server is None:
            return
        if time.monotonic() > end:
            message = f"A server still holds the weights: an API process with SPARD_SERVING_URL={server} unloads them"
            raise Unavailable(f"{message} as soon as it can; ask again until then.", code="still_loaded")
        time.sleep(_LOOK_S)


def _condemn(session: Session, which: ColumnElement[bool]) -> None:
    condemned = update(ServedAdapter).where(which, ServedAdapter.condemned_at.is_(None))
    session.execute(condemned.values(condemned_at=timestamp()))
