"""What routes ask for: a session, the storage, the caller.

What waits for nothing is `async`: anything else costs the request a trip to another thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from app import db
from app.audit_log import service as audit_log
from app.audit_log.service import CALLER, Caller
from app.db import Begin
from app.errors import Forbidden, Unauthorized
from app.files.counting import Counters
from app.files.validation import Limits
from app.http.key_throttle import KeyThrottle
from app.http.lanes import Lane, Lanes, Share
from app.http.rate_limit import RateLimits
from app.keys import browser_sessions
from app.keys import service as keys
from app.keys.service import Principal, Recognized
from app.quotas import service as quotas
from app.settings import Settings
from app.storage import Storage


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


async def _storage(request: Request) -> Storage:
    storage: Storage = request.app.state.storage
    return storage


async def _quick_storage(request: Request) -> Storage:
    storage: Storage = request.app.state.quick_storage
    return storage


SettingsDep = Annotated[Settings, Depends(_settings)]
EngineDep = Annotated[Engine, Depends(_engine)]
StorageDep = Annotated[Storage, Depends(_storage)]
QuickStorageDep = Annotated[Storage, Depends(_quick_storage)]  # gives up soon: for reads while a client waits


async def _caller(request: Request) -> Caller:
    return _caller_of(request)


def _caller_of(request: Request) -> Caller:
    """Return the request's caller; once its key is recognized, the audit log names it for what its sessions do."""
    state = request.state
    if not hasattr(state, CALLER):
        setattr(state, CALLER, Caller())
    caller: Caller = getattr(state, CALLER)
    return caller


CallerDep = Annotated[Caller, Depends(_caller)]


def _session(engine: EngineDep, caller: CallerDep) -> Iterator[Session]:
    with db.transaction(engine, {CALLER: caller}) as session:
        yield session


def _provider_session(engine: EngineDep, caller: CallerDep) -> Iterator[Session]:
    with db.provider_transaction(engine, {CALLER: caller}) as session:
        yield session


def _read_session(engine: EngineDep) -> Iterator[Session]:
    with db.read(engine) as session:
        yield session


async def _begin(engine: EngineDep, caller: CallerDep) -> Begin:
    return partial(db.transaction, engine, {CALLER: caller})


async def _look(engine: EngineDep) -> Begin:
    return partial(db.read, engine)


async def _provider_begin(engine: EngineDep, caller: CallerDep) -> Begin:
    return partial(db.provider_transaction, engine, {CALLER: caller})


async def _counters(request: Request) -> Counters:
    counters: Counters = request.app.state.counters
    return counters


def _limits_of(settings: Settings, most_mb: int) -> Limits:
    bad_status: Literal["error", "processed"] = "processed" if settings.bad_files == "fail" else "error"
    return Limits(most_mb << 20, settings.max_line_bytes, settings.max_rows, bad_status)


async def _limits(settings: SettingsDep) -> Limits:
    return _limits_of(settings, settings.max_upload_mb)


async def _multipart_limits(settings: SettingsDep) -> Limits:
    return _limits_of(settings, settings.max_multipart_mb)


# scope="function": the commit comes before the response leaves, so that a 200 is never a lie.
SessionDep = Annotated[Session, Depends(_session, scope="function")]
ReadDep = Annotated[Session, Depends(_read_session, scope="function")]
# For routes that wait for clients or for the storage: no transaction is open meanwhile. LookDep is read-only.
BeginDep = Annotated[Begin, Depends(_begin)]
LookDep = Annotated[Begin, Depends(_look)]
# For routes by which a provider writes.
ProviderSessionDep = Annotated[Session, Depends(_provider_session, scope="function")]
ProviderBeginDep = Annotated[Begin, Depends(_provider_begin)]
CountersDep = Annotated[Counters, Depends(_counters)]
LimitsDep = Annotated[Limits, Depends(_limits)]
MultipartLimitsDep = Annotated[Limits, Depends(_multipart_limits)]

_NO_KEY = "Give your API key in the header: Authorization: Bearer YOUR_KEY."
_bearer = HTTPBearer(auto_error=False, description="A key of this service: sk-spard-...")


def _principal(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    request: Request,
    engine: EngineDep,
    settings: SettingsDep,
    caller: CallerDep,
) -> Principal:
    """Recognize the key; a browser that is signed in reads without one, as pages and their streams do."""
    if credentials is not None:
        return recognize_key(request, engine, settings, caller, credentials.credentials)
    signed_in = signed_in_browser(request, engine, settings, caller) if request.method == "GET" else None
    if signed_in is None:
        raise Unauthorized(_NO_KEY)
    return signed_in


def recognize_key(request: Request, engine: Engine, settings: Settings, caller: Caller, secret: str) -> Principal:
    """Return whose key it is; 401 for a wrong one, 429 for too many wrong ones or requests."""
    with db.read(engine) as session:
        found = _recognized(request, session, settings, caller, secret)
    _note_use(engine, found)
    return found.principal


def _recognized(request: Request, session: Session, settings: Settings, caller: Caller, secret: str) -> Recognized:
    throttle: KeyThrottle = request.app.state.key_throttle
    throttle.check(_address(request), secret, settings.wrong_keys_per_minute)
    found = keys.authenticate(session, secret)
    if found is None:
        throttle.note_invalid(_address(request), settings.wrong_keys_per_minute)
        raise Unauthorized("The API key is not valid; it may be mistyped, expired or revoked.")
    throttle.note_valid(_address(request), secret)
    own = found.requests_per_minute
    _let_in(request, caller, found.principal, settings.requests_per_minute if own is None else own)
    return found


def _note_use(engine: Engine, found: Recognized) -> None:
    """Store the use of a key now and then; no other transaction of the request is open meanwhile."""
    if not found.is_use_noted:
        with db.transaction(engine) as session:
            keys.note_use(session, found.principal)


def signed_in_browser(request: Request, engine: Engine, settings: Settings, caller: Caller) -> Principal | None:
    """Return whose key a browser was signed in with; None for one that is not, or no longer."""
    cookie = request.cookies.get(browser_sessions.COOKIE)
    if not cookie:
        return None
    with db.read(engine) as session:
        return _signed_in(request, session, settings, caller, cookie)


def _signed_in(request: Request, session: Session, settings: Settings, caller: Caller, cookie: str) -> Principal | None:
    principal = browser_sessions.recognized(session, cookie)
    if principal is None:
        return None
    per_minute = quotas.request_rate(session, principal.project_id, settings.requests_per_minute)
    _let_in(request, caller, principal, per_minute)
    return principal


def _let_in(request: Request, caller: Caller, principal: Principal, per_minute: int | None) -> None:
    caller.principal = principal
    request.state.headers = {}
    if per_minute is not None:
        _count_request(request, principal, per_minute)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _count_request(request: Request, principal: Principal, per_minute: int) -> None:
    """Count a request against its project's rate limit; raise 429 above it. Headers of the answer say what is left."""
    limits: RateLimits = request.app.state.rate_limits
    taken = limits.take("requests", principal.project_id, per_minute)
    request.state.headers = taken.headers()
    taken.require("requests")


def _scoped(scope: str, principal: Principal) -> Principal:
    if scope not in principal.scopes:
        raise Forbidden(f'This key lacks the scope "{scope}", which this request needs.')
    return principal


async def _customer(principal: Annotated[Principal, Depends(_principal)], request: Request) -> Principal:
    """Require the scope `customer`; for GET, `read` is enough."""
    return _reader(principal) if request.method == "GET" else _scoped("customer", principal)


def _reader(principal: Principal) -> Principal:
    return principal if "read" in principal.scopes else _scoped("customer", principal)


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to a customer's reads, each worked out in one thread and one session, from the key to the JSON.

    A thread for each dependency of a route, and one to write its answer, cost several times what the work does.
    """

    request: Request
    secret: str | None
    cookie: str  # of a browser that is signed in; counts where no key is sent

    async def of(self, work: Callable[[Session, Principal], BaseModel]) -> Response:
        """Return what `work` reads for the caller as JSON; 401 and 403 as `CustomerDep` raises them."""
        return await run_in_threadpool(self._answer, work)

    def _answer(self, work: Callable[[Session, Principal], BaseModel]) -> Response:
        engine: Engine = self.request.app.state.engine
        found: Recognized | None = None
        try:
            with db.read(engine) as session:
                found = self._recognized(session)
                text = work(session, _reader(found.principal)).model_dump_json()
        finally:
            if found:
                _note_use(engine, found)
        return Response(text, media_type="application/json")

    def _recognized(self, session: Session) -> Recognized:
        settings: Settings = self.request.app.state.settings
        caller = _caller_of(self.request)
        if self.secret is not None:
            return _recognized(self.request, session, settings, caller, self.secret)
        principal = _signed_in(self.request, session, settings, caller, self.cookie)
        if principal is None:
            raise Unauthorized(_NO_KEY)
        return Recognized(principal, None, is_use_noted=True)


async def _answers(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)], request: Request
) -> Answers:
    cookie = request.cookies.get(browser_sessions.COOKIE) or ""
    if credentials is None and not cookie:
        raise Unauthorized(_NO_KEY)
    return Answers(request, credentials.credentials if credentials else None, cookie)


def _admin(principal: Annotated[Principal, Depends(_principal)], request: Request, begin: BeginDep) -> Principal:
    """Require the scope `admin`; an attempt without it is written to the audit log."""
    try:
        return _scoped("admin", principal)
    except Forbidden:
        with begin() as session:
            audit_log.record(session, "admin.denied", f"{request.method} {request.scope['route'].path}", "denied")
        raise


KeyDep = Annotated[Principal, Depends(_principal)]  # any valid key, whatever its scopes
CustomerDep = Annotated[Principal, Depends(_customer)]
AnswersDep = Annotated[Answers, Depends(_answers)]  # for reads that are asked often
AdminDep = Annotated[Principal, Depends(_admin)]


def _lane(chosen: Callable[[Lanes], Lane]) -> Callable[..., Awaitable[Share]]:
    async def share(request: Request, principal: KeyDep) -> Share:
        return chosen(request.app.state.lanes).of(principal.project_id)

    return share


# For work that waits for the storage or computes for long: see app/http/lanes.py.
ReadsDep = Annotated[Share, Depends(_lane(lambda lanes: lanes.reads))]
PreviewsDep = Annotated[Share, Depends(_lane(lambda lanes: lanes.previews))]
WritesDep = Annotated[Share, Depends(_lane(lambda lanes: lanes.writes))]

# The id that a page of a list begins after.
AfterQuery = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
