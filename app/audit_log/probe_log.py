"""Log keys that request unknown ids or ids of other projects, at most once a minute per key.

Both cases are logged alike and after the response, so neither its bytes nor its timing tells them apart. The entry of
an id's creation tells whose it is.
"""

from __future__ import annotations

from fastapi import Request
from starlette.background import BackgroundTask

from app import db
from app.audit_log import service as audit_log
from app.audit_log.service import CALLER, Caller
from app.errors import HasNone, NotFound
from app.http.rate_limit import RateLimits

_PER_MINUTE = 1  # entries per key
_SHOWN = 200  # characters of the message, which contains the id


def probe_task(request: Request, error: NotFound) -> BackgroundTask | None:
    """Return a task that logs the probe after the response; None if it is no probe or one was just logged."""
    caller: Caller | None = getattr(request.state, CALLER, None)
    limits: RateLimits = request.app.state.rate_limits
    if isinstance(error, HasNone) or caller is None or caller.principal is None:
        return None
    if not limits.take("probes", caller.principal.key_id, _PER_MINUTE).is_allowed:
        return None
    return BackgroundTask(_note, request, caller, error)


def _note(request: Request, caller: Caller, error: NotFound) -> None:
    target = f"{request.method} {request.scope['route'].path}"
    with db.transaction(request.app.state.engine, {CALLER: caller}) as session:
        audit_log.record(session, "id.unknown", target, "denied", code=error.code, message=error.message[:_SHOWN])
