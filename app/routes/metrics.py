"""GET /metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from app.deps import ReadDep
from app.ops.metrics import MEDIA_TYPE, RequestMetrics, queue_text

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse)
def read_metrics(request: Request, session: ReadDep) -> PlainTextResponse:
    """Return metrics in Prometheus's format: the queue of the service, and the requests of this process."""
    requests: RequestMetrics = request.app.state.requests
    return PlainTextResponse(requests.text() + queue_text(session), media_type=MEDIA_TYPE)
