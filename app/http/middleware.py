"""Add an id to every response, limit bodies, and send errors in OpenAI's envelope with RFC 9457's members."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from secrets import token_hex

import structlog
from anyio import BrokenResourceError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.db import limit_lock_waits
from app.errors import AppError, NotFound, Unavailable
from app.http import connections, openapi
from app.http.bodies import limit_pace

log = logging.getLogger(__name__)

LOCK_WAITS_S = 20.0  # per request, for SQLite's write lock
_JSON_BODY_BYTES = 1 << 20
_QUIET = ("/healthz", "/readyz", "/metrics")  # polled every few seconds by machines
_PROBLEM_TYPE = "urn:spard:error:"


class Envelope:
    """The outermost middleware: assigns request ids, limits bodies, and turns uncaught errors into answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._knows_server = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, log and count one request; an error after the response has begun can only abort it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id, started, began = f"req_{token_hex(12)}", False, time.perf_counter()
        scope.setdefault("state", {})["request_id"] = request_id
        self._look_at_server(scope)
        openapi.serving_app.set(scope["app"])
        limit_lock_waits(LOCK_WAITS_S)

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                scope["state"]["status"] = message["status"]
                headers = MutableHeaders(scope=message)
                # The rate limit's headers are in the state, so that error responses have them too.
                headers.update({"x-request-id": request_id, **scope["state"].get("headers", {})})
                _keep_private(scope, headers)
            await send(message)

        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if any(ord(char) < 32 for char in scope["path"]):
            return await problem(scope, NotFound("Unknown URL.", code="unknown_url"))(scope, receive, send_named)
        try:
            await self._app(scope, _limit_body(scope, receive), send_named)
        except ClientDisconnect:
            log.info("the client went away")
        except asyncio.CancelledError:  # the server's shutdown timeout has passed
            if not started:
                await problem(scope, Unavailable("This server is shutting down; try again."))(
                    scope, receive, send_named
                )
            raise
        except Exception as exc:
            if started and _comes_of_leaving(exc):
                log.info("the client went away")
            elif (error := _as_error(exc, request_id)) and not started:
                await problem(scope, error)(scope, receive, send_named)
        finally:
            _note(scope, time.perf_counter() - began)
        return None

    def _look_at_server(self, scope: Scope) -> None:
        """Warn if the server has no connection limits; only a request shows that, so check the first one."""
        if not self._knows_server:
            self._knows_server = True
            connections.warn_if_unbounded(scope)


def _comes_of_leaving(exc: Exception) -> bool:
    """Return True for the error that FastAPI raises when a client leaves a stream while an event waits to be sent."""
    return isinstance(exc, ExceptionGroup) and exc.split(BrokenResourceError)[1] is None


def _keep_private(scope: Scope, headers: MutableHeaders) -> None:
    """Set `cache-control: private, no-store` on API responses whose route sets no value of its own."""
    if scope["path"].startswith("/v1/") and headers.get("cache-control", "no-cache") == "no-cache":
        headers["cache-control"] = "private, no-store"


def _note(scope: Scope, seconds: float) -> None:
    """Log and count a request under its route's pattern, which contains no ids."""
    route, status = getattr(scope.get("route"), "path", "unknown"), scope["state"].get("status", 499)
    scope["app"].state.requests.note(scope["method"], route, status, seconds)
    if route not in _QUIET:
        text = f"{scope['method']} {scope['path']} {status}"
        log.info(text, extra={"status": status, "seconds": round(seconds, 4)})


def problem(scope: Scope, error: AppError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error, as JSON or, if the client accepts it, `application/problem+json`."""
    inner: dict[str, object] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    if error.details:
        inner |= {"details": error.details}
    if error.details_url:
        inner |= {"details_url": error.details_url}
    name = error.code or error.type
    body = {
        "error": inner,
        "type": f"{_PROBLEM_TYPE}{name}",
        "title": name.replace("_", " ").capitalize(),
        "status": error.status,
        "detail": error.message,
        "instance": scope["state"]["request_id"],
    }
    accepts = "application/problem+json" in Headers(scope=scope).get("accept", "")
    return Response(
        json.dumps(body),  # ASCII, so that no client text breaks the encoding
        status_code=error.status,
        headers={**(headers or {}), **_own_headers(error)},
        media_type="application/problem+json" if accepts else "application/json",
    )


def _own_headers(error: AppError) -> dict[str, str]:
    found = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
    found |= {"x-should-retry": "false"} if error.is_final else {}
    found |= {"x-should-retry": "true"} if error.is_worth_retrying else {}
    found |= {"connection": "close"} if error.status == 408 else {}
    return found | ({"www-authenticate": "Bearer"} if error.status == 401 else {})


def _as_error(exc: Exception, request_id: str) -> AppError:
    if isinstance(exc, AppError):
        return exc
    log.exception("the request failed", exc_info=exc)
    message = f"The server had an error; name {request_id} when you report it."
    return AppError(message, code="server_error", type="server_error", status=500)


def _limit_body(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that limits a body's size and pace; upload routes raise `body_bytes` first."""
    state, received, receive = scope["state"], 0, limit_pace(receive)
    state["body_bytes"] = _JSON_BODY_BYTES

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > state["body_bytes"]:
            raise HTTPException(413, f"The body is larger than {state['body_bytes']} bytes.")
        return message

    return receive_limited
