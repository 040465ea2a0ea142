"""For load balancers and supervisors: whether the process lives, and whether it can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from app.errors import Unavailable
from app.http.server_bounds import UNBOUNDED, is_bounded
from app.ops.readiness import Readiness
from app.ops.supervisor import Supervisor

if TYPE_CHECKING:
    from app.inference.vllm_limits import ServerWatch

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def is_alive() -> dict[str, str]:
    """Answer 200 as long as the process runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def is_ready(request: Request) -> dict[str, str | list[str]]:
    """Answer 503 with the reason unless this process can serve; `warnings` say what it serves badly or refuses.

    Schema and storage are as they must be, the disk has room, the worker beside this process is at work, and nothing
    has been full for long.
    """
    worker: Supervisor | None = request.app.state.worker
    if worker and not worker.is_at_work:
        raise Unavailable("The worker of this service is not running; its log says why.")
    readiness: Readiness = request.app.state.readiness
    await readiness.check()
    found = _warnings(request)
    return {"status": "ready", "warnings": found} if found else {"status": "ready"}


def _warnings(request: Request) -> list[str]:
    """Return what keeps nothing from being served, and has to be known."""
    watch: ServerWatch | None = request.app.state.server_watch
    found = list(watch.report.refusals) if watch and watch.report else []
    return found if is_bounded(request.scope) else [*found, UNBOUNDED]
