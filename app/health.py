"""For load balancers and supervisors: whether the process lives, and whether it can serve."""

from __future__ import annotations

from fastapi import APIRouter

from app import db
from app.deps import EngineDep, StorageDep
from app.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/healthz")
def is_alive() -> dict[str, str]:
    """Answers as long as the process does."""
    return {"status": "ok"}


@router.get("/readyz")
def is_ready(engine: EngineDep, storage: StorageDep) -> dict[str, str]:
    """Answers 503 until the database has the schema of this version and the storage answers."""
    if db.schema_state(engine) == "behind":  # one that is ahead is written to be served by the version before, too
        raise Unavailable("The database's schema is older than this version: run `spard migrate`.")
    storage.exists("readyz")
    return {"status": "ready"}
