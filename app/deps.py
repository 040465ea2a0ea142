"""Dependencies of routes: sessions, storage, the caller.

Dependencies that never block are `async`; others cost each request a switch to another thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.base import SecurityBase
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app import db
from app.audit_log import service as audit_log
from app.audit_log.service import CALLER, Caller
from app.callers import NO_KEY, Answers, reader, recognize_key, request_caller, require_scope, signed_in_browser
from app.db import Begin
from app.errors import Forbidden, Unauthorized
from app.files.counting import Counters
from app.files.validation import Limits
from app.http.common_threads import common_threads
from app.http.lanes import Lane, Lanes, Share
from app.keys import browser_sessions
from app.keys.service import Principal
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
QuickStorageDep = Annotated[Storage, Depends(_quick_storage)]  # short timeouts, for reads while a client waits


async def _caller(request: Request) -> Caller:
    return request_caller(request)


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


def _upload_limits(settings: Settings, most_mb: int) -> Limits:
    bad_status: Literal["error", "processed"] = "processed" if settings.bad_files == "fail" else "error"
    return Limits(most_mb << 20, settings.max_line_bytes, settings.max_rows, bad_status)


async def _limits(settings: SettingsDep) -> Limits:
    return _upload_limits(settings, settings.max_upload_mb)


async def _multipart_limits(settings: SettingsDep) -> Limits:
    return _upload_limits(settings, settings.max_multipart_mb)


# scope="function": the commit happens before the response is sent, so a 200 always means committed.
SessionDep = Annotated[Session, Depends(_session, scope="function")]
ReadDep = Annotated[Session, Depends(_read_session, scope="function")]
# For routes that wait for clients or the storage: they open short transactions themselves. LookDep is read-only.
BeginDep = Annotated[Begin, Depends(_begin)]
LookDep = Annotated[Begin, Depends(_look)]
# For writes of the provider.
ProviderSessionDep = Annotated[Session, Depends(_provider_session, scope="function")]
ProviderBeginDep = Annotated[Begin, Depends(_provider_begin)]
CountersDep = Annotated[Counters, Depends(_counters)]
LimitsDep = Annotated[Limits, Depends(_limits)]
MultipartLimitsDep = Annotated[Limits, Depends(_multipart_limits)]

_bearer = HTTPBearer(auto_error=False, description="A key of this service: sk-spard-...")


async def _principal(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    request: Request,
    engine: EngineDep,
    settings: SettingsDep,
    caller: CallerDep,
) -> Principal:
    """Authenticate the caller by key or, for GET only, by the browser session that pages and streams use."""

    def recognize_principal() -> Principal | None:
        if credentials is not None:
            return recognize_key(request, engine, settings, caller, credentials.credentials)
        return signed_in_browser(request, engine, settings, caller) if request.method == "GET" else None

    async with common_threads(request).place(request):
        principal = await run_in_threadpool(recognize_principal)
    if principal is None:
        raise Unauthorized(NO_KEY)
    return principal


async def _customer(principal: Annotated[Principal, Depends(_principal)], request: Request) -> Principal:
    """Require the scope `customer`; for GET, `read` suffices."""
    return reader(principal) if request.method == "GET" else require_scope("customer", principal)


class _Answering(SecurityBase):
    """Reads the key itself and documents it in the API reference: a separate dependency costs every request."""

    model, scheme_name = _bearer.model, _bearer.scheme_name

    async def __call__(self, request: Request) -> Answers:
        """Return the request's `Answers`; raise 401 for a request with neither key nor cookie."""
        credentials = await _bearer(request)
        cookie = request.cookies.get(browser_sessions.COOKIE) or ""
        if credentials is None and not cookie:
            raise Unauthorized(NO_KEY)
        return Answers(request, credentials.credentials if credentials else None, cookie)


def _admin(principal: Annotated[Principal, Depends(_principal)], request: Request, begin: BeginDep) -> Principal:
    """Require the scope `admin`; a request without it is recorded in the audit log."""
    try:
        return require_scope("admin", principal)
    except Forbidden:
        with begin() as session:
            audit_log.record(session, "admin.denied", f"{request.method} {request.scope['route'].path}", "denied")
        raise


KeyDep = Annotated[Principal, Depends(_principal)]  # any valid key, whatever its scopes
CustomerDep = Annotated[Principal, Depends(_customer)]
AnswersDep = Annotated[Answers, Depends(_Answering())]  # for frequent reads
AdminDep = Annotated[Principal, Depends(_admin)]


def _lane(chosen: Callable[[Lanes], Lane]) -> Callable[..., Awaitable[Share]]:
    async def share(request: Request, principal: KeyDep) -> Share:
        return chosen(request.app.state.lanes).project_share(principal.project_id)

    return share


# For work that waits for the storage or computes for long: see app/http/lanes.py.
ReadsDep = Annotated[Share, Depends(_lane(lambda lanes: lanes.reads))]
PreviewsDep = Annotated[Share, Depends(_lane(lambda lanes: lanes.previews))]
WritesDep = Annotated[Share, Depends(_lane(lambda lanes: lanes.writes))]

# The id of the row after which a page begins.
AfterQuery = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
