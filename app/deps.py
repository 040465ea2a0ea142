"""Dependencies of routes: sessions, storage, the caller, and the multipart forms of uploads as they arrive.

Dependencies that never block are `async`; others cost each request a switch to another thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.base import SecurityBase
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from app import audit_log, db, keys
from app.audit_log import CALLER, Caller
from app.callers import NO_KEY, Answers, reader, recognize_key, request_caller, require_scope, signed_in_browser
from app.db import Begin
from app.errors import Forbidden, TooLarge, Unauthorized, UnsupportedMedia
from app.files.counting import Counters
from app.files.validation import Limits
from app.http import bodies
from app.http.bodies import Form
from app.http.lanes import Lane, Lanes, Share, Slots, common_threads
from app.keys import Principal
from app.settings import Settings
from app.storage import Storage
from app.uploads import PART_BYTES

_FORM_BYTES = 1 << 20  # a form may exceed its file by this much
_DRAIN_BYTES = 16 << 20


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


class _KeyAuthentication(SecurityBase):
    """Reads the key itself and documents it in the API reference: a separate dependency costs every request."""

    model, scheme_name = _bearer.model, _bearer.scheme_name

    async def __call__(self, request: Request) -> Answers:
        """Return the request's `Answers`; raise 401 for a request with neither key nor cookie."""
        credentials = await _bearer(request)
        cookie = request.cookies.get(keys.COOKIE) or ""
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

AnswersDep = Annotated[Answers, Depends(_KeyAuthentication())]  # for frequent reads

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


def _form(
    request: Request,
    limits: LimitsDep,
    principal: KeyDep,
    settings: SettingsDep,
) -> Iterator[Form]:
    """Yield the form of an upload as it arrives; its body is not read without a valid key."""
    yield from upload_form(request, principal, settings, limits)


def upload_form(request: Request, principal: Principal, settings: Settings, limits: Limits) -> Iterator[Form]:
    """Yield the form of an upload by an authenticated caller."""
    with _upload_slot(request, principal, settings):
        yield from _open_form(request, "file", limits.bytes)


def _part_form(request: Request, principal: KeyDep, settings: SettingsDep) -> Iterator[Form]:
    """Yield the form of one part of an upload as it arrives."""
    with _upload_slot(request, principal, settings):
        yield from _open_form(request, "data", PART_BYTES)


def _upload_slot(request: Request, principal: Principal, settings: Settings) -> AbstractContextManager[None]:
    uploads: Slots = request.app.state.uploads
    return uploads.place(principal.project_id, settings.uploads_at_once)


def _open_form(request: Request, part: str, limit: int) -> Iterator[Form]:
    if bodies.are_compressed(request.headers):
        raise UnsupportedMedia("Send the body uncompressed.", code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    request.state.body_bytes = limit + _FORM_BYTES
    if declared.isdecimal() and int(declared) > request.state.body_bytes:
        raise TooLarge(f"The file is larger than {limit} bytes.", param=part)
    body_bytes = int(declared) if declared.isdecimal() else None
    form = Form(request.headers.get("content-type", ""), bodies.chunks(request.stream()), part, body_bytes)
    try:
        yield form
    finally:
        # A client reads the answer only after it has sent its body; what it still sends is dropped, up to a limit.
        if not form.drain(_DRAIN_BYTES) and not declared:
            request.state.headers |= {"connection": "close"}  # a body of unknown length may be endless


FormDep = Annotated[Form, Depends(_form, scope="function")]

PartFormDep = Annotated[Form, Depends(_part_form, scope="function")]
