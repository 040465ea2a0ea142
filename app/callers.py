"""Authenticate callers by key or browser session, count their requests, and answer frequent reads cheaply.

Keys that request unknown ids or ids of other projects are logged, at most once a minute per key. Both cases are logged
alike and after the response, so neither its bytes nor its timing tells them apart. The entry of an id's creation tells
whose it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from pydantic import BaseModel
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from app import audit_log, db, keys
from app.audit_log import CALLER, Caller
from app.errors import Forbidden, HasNone, NotFound, Unauthorized
from app.http.lanes import common_threads
from app.http.rate_limit import KeyThrottle, RateLimits
from app.keys import Authentication, Principal
from app.settings import Settings

_USE_WAIT_S = 1.0
NO_KEY = "Give your API key in the header: Authorization: Bearer YOUR_KEY."
_PROBES_PER_MINUTE = 1  # entries per key
_SHOWN = 200  # characters of the message, which contains the id


def request_caller(request: Request) -> Caller:
    """Return the request's caller; once it is authenticated, the audit log names it in the request's sessions."""
    state = request.state
    if not hasattr(state, CALLER):
        setattr(state, CALLER, Caller())
    caller: Caller = getattr(state, CALLER)
    return caller


def recognize_key(request: Request, engine: Engine, settings: Settings, caller: Caller, secret: str) -> Principal:
    """Return the principal of a key; raise 401 for a wrong key, 429 for too many wrong keys or requests."""
    with db.read(engine) as session:
        found = _recognize_key(request, session, settings, caller, secret)
    _note_use(engine, found)
    return found.principal


def _recognize_key(
    request: Request, reader: db.Reader, settings: Settings, caller: Caller, secret: str
) -> Authentication:
    throttle: KeyThrottle = request.app.state.key_throttle
    throttle.check(_address(request), secret, settings.wrong_keys_per_minute)
    found = keys.authenticate(reader, secret)
    if found is None:
        throttle.note_invalid(_address(request), settings.wrong_keys_per_minute)
        raise Unauthorized("The API key is not valid; it may be mistyped, expired or revoked.")
    # From now on this key is accepted from this address, even if others there send wrong ones.
    throttle.note_valid(_address(request), secret)
    own = found.requests_per_minute
    _admit(request, caller, found.principal, settings.requests_per_minute if own is None else own)
    return found


def _note_use(engine: Engine, found: Authentication) -> None:
    """Store the time of a key's use, at intervals; call this while the request has no other open transaction.

    If another program has locked the database, a later request stores it: a read must not wait for that.
    """
    if found.is_use_noted:
        return
    try:
        with db.brief_lock_waits(_USE_WAIT_S), db.transaction(engine) as session:
            keys.note_use(session, found.principal)
    except OperationalError as error:
        if not db.is_sqlite_locked(error):
            raise


def signed_in_browser(request: Request, engine: Engine, settings: Settings, caller: Caller) -> Principal | None:
    """Return the principal of a signed-in browser; None if it is not signed in any more."""
    cookie = request.cookies.get(keys.COOKIE)
    if not cookie:
        return None
    with db.look(engine) as connection:
        found = _recognize_browser(request, connection, settings, caller, cookie)
    return found.principal if found else None


def _recognize_browser(
    request: Request, reader: db.Reader, settings: Settings, caller: Caller, cookie: str
) -> Authentication | None:
    found = keys.recognize_cookie(reader, cookie)
    if found:
        own = found.requests_per_minute
        _admit(request, caller, found.principal, settings.requests_per_minute if own is None else own)
    return found


def _admit(request: Request, caller: Caller, principal: Principal, per_minute: int | None) -> None:
    # Also set on sessions that are open already: they refer to the same `Caller`.
    caller.principal = principal
    common_threads(request).note_project(request, principal.project_id)
    request.state.headers = {}
    if per_minute is not None:
        _count_request(request, principal, per_minute)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _count_request(request: Request, principal: Principal, per_minute: int) -> None:
    """Count a request against its project's rate limit, whose state goes into the headers; raise 429 above it."""
    limits: RateLimits = request.app.state.rate_limits
    taken = limits.take("requests", principal.project_id, per_minute)
    request.state.headers = taken.headers()
    taken.require("requests")


def require_scope(scope: str, principal: Principal) -> Principal:
    """Return the caller if its key has the scope; raise `Forbidden` otherwise."""
    if scope not in principal.scopes:
        raise Forbidden(f'This key lacks the scope "{scope}", which this request needs.')
    return principal


def reader(principal: Principal) -> Principal:
    """Return the caller of a customer's read, for which the scope `read` suffices; raise `Forbidden` otherwise."""
    return principal if "read" in principal.scopes else require_scope("customer", principal)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers a customer's frequent reads, each in one thread and one transaction, from the key to the JSON.

    With a thread for each dependency of a route, and one for its answer, threads cost several times the work itself.
    """

    request: Request
    secret: str | None
    cookie: str  # of a signed-in browser; used if no key is sent

    async def respond(self, work: Callable[[Connection, Principal], BaseModel]) -> Response:
        """Return the result of `work` for the caller as JSON; raise 401 and 403 as `CustomerDep` does."""
        async with common_threads(self.request).place(self.request):
            return await run_in_threadpool(self._answer, work)

    def _answer(self, work: Callable[[Connection, Principal], BaseModel]) -> Response:
        engine: Engine = self.request.app.state.engine
        found: Authentication | None = None
        try:
            with db.look(engine) as connection:
                found = self._recognize(connection)
                text = work(connection, reader(found.principal)).model_dump_json()
        finally:
            if found:
                _note_use(engine, found)
        return Response(text, media_type="application/json")

    def _recognize(self, connection: Connection) -> Authentication:
        settings: Settings = self.request.app.state.settings
        caller = request_caller(self.request)
        if self.secret is not None:
            return _recognize_key(self.request, connection, settings, caller, self.secret)
        found = _recognize_browser(self.request, connection, settings, caller, self.cookie)
        if found is None:
            raise Unauthorized(NO_KEY)
        return found


def probe_task(request: Request, error: NotFound) -> BackgroundTask | None:
    """Return a task that logs the probe after the response; None if it is no probe or one was just logged."""
    caller: Caller | None = getattr(request.state, CALLER, None)
    limits: RateLimits = request.app.state.rate_limits
    if isinstance(error, HasNone) or caller is None or caller.principal is None:
        return None
    if not limits.take("probes", caller.principal.key_id, _PROBES_PER_MINUTE).is_allowed:
        return None
    return BackgroundTask(_log_probe, request, caller, error)


def _log_probe(request: Request, caller: Caller, error: NotFound) -> None:
    target = f"{request.method} {request.scope['route'].path}"
    with db.transaction(request.app.state.engine, {CALLER: caller}) as session:
        audit_log.record(session, "id.unknown", target, "denied", code=error.code, message=error.message[:_SHOWN])
