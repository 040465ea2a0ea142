"""Endpoints for load balancers, supervisors and Prometheus: is the process alive, can it serve, and how busy is it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from app.deps import ReadDep
from app.errors import Unavailable
from app.http.connections import UNBOUNDED, is_bounded
from app.ops.metrics import MEDIA_TYPE, RequestMetrics, queue_text
from app.ops.readiness import Readiness
from app.ops.supervisor import Supervisor

if TYPE_CHECKING:
    from app.inference.vllm_server import ServerWatch

router = APIRouter(tags=["health"])
metrics = APIRouter(tags=["health"])


@router.get("/healthz")
async def is_alive() -> dict[str, str]:
    """Answer 200 while the process runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def is_ready(request: Request) -> dict[str, str | list[str]]:
    """Answer 200 if this process can serve, else 503 with the reason; `warnings` list degraded services.

    Checked are the schema, the storage, free disk space, the worker beside this process if there is one, and that no
    lane of threads has been full for long.
    """
    worker: Supervisor | None = request.app.state.worker
    if worker and not worker.is_at_work:
        raise Unavailable("The worker of this service is not running; its log says why.")
    readiness: Readiness = request.app.state.readiness
    await readiness.check()
    found = _warnings(request)
    return {"status": "ready", "warnings": found} if found else {"status": "ready"}


def _warnings(request: Request) -> list[str]:
    """Return problems that do not prevent serving but should be known."""
    watch: ServerWatch | None = request.app.state.server_watch
    found = list(watch.report.refusals) if watch and watch.report else []
    return found if is_bounded(request.scope) else [*found, UNBOUNDED]


@metrics.get("/metrics", response_class=PlainTextResponse)
def read_metrics(request: Request, session: ReadDep) -> PlainTextResponse:
    """Return metrics in Prometheus's format: the queue of the service, and the requests of this process."""
    requests: RequestMetrics = request.app.state.requests
    return PlainTextResponse(requests.text() + queue_text(session), media_type=MEDIA_TYPE)
