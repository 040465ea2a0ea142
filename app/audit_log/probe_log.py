"""Keys that ask for what is not there or not theirs: noted in the audit log, for each key once a minute at most.

An unknown id and somebody else's are noted alike and after the answer, so that neither its bytes nor its time tell them
apart. Whose an id is, the entry of its making says.
"""

from __future__ import annotations

from fastapi import Request
from starlette.background import BackgroundTask

from app import db
from app.audit_log import service as audit_log
from app.audit_log.service import CALLER, Caller
from app.errors import HasNone, NotFound
from app.http.rate_limit import RateLimits

_PER_MINUTE = 1  # of a key
_SHOWN = 200  # characters of a message: it names the id


def probe_task(request: Request, error: NotFound) -> BackgroundTask | None:
    """Return the task that logs the probe once the answer is sent; None if it is none, or was just logged."""
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
