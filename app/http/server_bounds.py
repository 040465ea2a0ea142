"""Check that the server limits its connections, as `app.http.connections` does."""

from __future__ import annotations

import logging

from starlette.types import Scope

from app.http.delivery import TRANSPORT

log = logging.getLogger(__name__)

SERVER = "app.http.connections:BoundedHttp"
UNBOUNDED = (
    "The server waits for the headers of a request without end, and for any number of connections: start it with "
    f"uvicorn's --http {SERVER}."
)


def is_bounded(scope: Scope) -> bool:
    """Return True if a request came through a server with these limits."""
    return TRANSPORT in scope.get("state", {})


def warn(scope: Scope) -> None:
    """Log a warning if a request's server does not have these limits."""
    if not is_bounded(scope):
        log.warning("%s", UNBOUNDED)
