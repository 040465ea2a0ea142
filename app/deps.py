"""What routes ask for: a session, the storage, the caller, an upload as it arrives.

What waits for nothing is `async`: anything else costs the request a trip to another thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from app import bodies, db
from app.audit_log import service as audit_log
from app.audit_log.service import CALLER, Caller
from app.bodies import Bodies
from app.errors import Forbidden, TooLarge, TooManyRequests, Unauthorized, UnsupportedMedia
from app.files.upload import Begin
from app.files.validation import Limits
from app.guesses import Guesses
from app.keys import service as keys
from app.keys.service import Principal
from app.multipart import Form
from app.quotas import service as quotas
from app.rates import Rates
from app.settings import Settings
from app.storage import Storage
from app.uploads.parts import PART_BYTES

_FORM_BYTES = 1 << 20  # what a form may be more than its file
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


SettingsDep = Annotated[Settings, Depends(_settings)]
EngineDep = Annotated[Engine, Depends(_engine)]
StorageDep = Annotated[Storage, Depends(_storage)]


async def _caller(request: Request) -> Caller:
    """One for each request: what is done in its sessions is logged under the key that it turns out to have."""
    state = request.state
    if not hasattr(state, CALLER):
        setattr(state, CALLER, Caller())
    caller: Caller = getattr(state, CALLER)
    return caller


CallerDep = Annotated[Caller, Depends(_caller)]


def _session(engine: EngineDep, caller: CallerDep) -> Iterator[Session]:
    with db.transaction(engine, {CALLER: caller}) as session:
        yield session


def _read_session(engine: EngineDep) -> Iterator[Session]:
    with db.read(engine) as session:
        yield session


async def _begin(engine: EngineDep, caller: CallerDep) -> Begin:
    return partial(db.transaction, engine, {CALLER: caller})


async def _limits(settings: SettingsDep) -> Limits:
    return Limits(settings.max_upload_mb << 20, settings.max_line_bytes, settings.max_rows)


async def _multipart_limits(settings: SettingsDep) -> Limits:
    return Limits(settings.max_multipart_mb << 20, settings.max_line_bytes, settings.max_rows)


# scope="function": the commit comes before the response leaves, so that a 200 is never a lie.
SessionDep = Annotated[Session, Depends(_session, scope="function")]
ReadDep = Annotated[Session, Depends(_read_session, scope="function")]
# For routes that stream first: no transaction is open while a client is slow.
BeginDep = Annotated[Begin, Depends(_begin)]
LimitsDep = Annotated[Limits, Depends(_limits)]
MultipartLimitsDep = Annotated[Limits, Depends(_multipart_limits)]

_bearer = HTTPBearer(auto_error=False, description="A key of this service: sk-spard-...")


def _principal(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    request: Request,
    engine: EngineDep,
    settings: SettingsDep,
    caller: CallerDep,
) -> Principal:
    if credentials is None:
        raise Unauthorized("Give your API key in the header: Authorization: Bearer YOUR_KEY.")
    secret, guesses = credentials.credentials, request.app.state.guesses
    _hear(request, secret, settings.wrong_keys_per_minute)
    with db.read(engine) as session:
        principal = keys.authenticate(session, secret)
        if principal is None:
            guesses.wrong(_address(request), settings.wrong_keys_per_minute)
            raise Unauthorized("The API key is not valid; it may be mistyped, expired or revoked.")
        per_minute = quotas.request_rate(session, principal.tenant_id, settings.requests_per_minute)
        is_noted = keys.is_use_noted(session, principal)
    guesses.right(_address(request), secret)
    caller.principal = principal
    request.state.headers = {}
    if per_minute is not None:
        _count(request, principal, per_minute)
    if not is_noted:
        with db.transaction(engine) as writing:
            keys.note_use(writing, principal)
    return principal


def _hear(request: Request, secret: str, per_minute: int) -> None:
    """Not those who have just guessed too often."""
    guesses: Guesses = request.app.state.guesses
    if wait_s := guesses.wait_s(_address(request), secret, per_minute):
        message = f"Too many wrong keys came from your address; wait {wait_s} s."
        error = TooManyRequests(message, code="too_many_wrong_keys")
        error.retry_after_s = wait_s
        raise error


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _count(request: Request, principal: Principal, per_minute: int) -> None:
    """One request more of a project's; its answer says how many are left."""
    rates: Rates = request.app.state.rates
    taken = rates.take(principal.tenant_id, per_minute)
    request.state.headers = taken.headers()
    if not taken.is_allowed:
        error = TooManyRequests(f"Your project may make {per_minute} requests a minute; wait {taken.retry_after_s} s.")
        error.retry_after_s = taken.retry_after_s
        raise error


def _scoped(scope: str, principal: Principal) -> Principal:
    if scope not in principal.scopes:
        raise Forbidden(f'This key lacks the scope "{scope}", which this request needs.')
    return principal


async def _customer(principal: Annotated[Principal, Depends(_principal)], request: Request) -> Principal:
    """A key that only reads may GET what its project's other keys may, and nothing else."""
    if request.method == "GET" and "read" in principal.scopes:
        return principal
    return _scoped("customer", principal)


def _admin(principal: Annotated[Principal, Depends(_principal)], request: Request, begin: BeginDep) -> Principal:
    """A key that tries what is the provider's alone is noted."""
    try:
        return _scoped("admin", principal)
    except Forbidden:
        with begin() as session:
            audit_log.record(session, "admin.denied", f"{request.method} {request.scope['route'].path}", "denied")
        raise


CustomerDep = Annotated[Principal, Depends(_customer)]
AdminDep = Annotated[Principal, Depends(_admin)]


def _form(
    request: Request,
    limits: LimitsDep,
    principal: Annotated[Principal, Depends(_principal)],
    settings: SettingsDep,
) -> Iterator[Form]:
    """A file as it arrives; asks for the principal so that no stranger's byte is read."""
    with _place(request, principal, settings):
        yield from _opened(request, "file", limits.bytes)


def _part_form(
    request: Request, principal: Annotated[Principal, Depends(_principal)], settings: SettingsDep
) -> Iterator[Form]:
    """A part of an upload as it arrives."""
    with _place(request, principal, settings):
        yield from _opened(request, "data", PART_BYTES)


def _place(request: Request, principal: Principal, settings: Settings) -> AbstractContextManager[None]:
    open_bodies: Bodies = request.app.state.bodies
    return open_bodies.place(principal.tenant_id, settings.uploads_at_once)


def _opened(request: Request, part: str, limit: int) -> Iterator[Form]:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("Send the body uncompressed.", code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    request.state.body_bytes = limit + _FORM_BYTES
    if declared.isdecimal() and int(declared) > request.state.body_bytes:
        raise TooLarge(f"The file is larger than {limit} bytes.", param=part)
    form = Form(request.headers.get("content-type", ""), bodies.chunks(request.stream()), part)
    try:
        yield form
    finally:
        if not form.drain(_DRAIN_BYTES) and not declared:
            request.state.headers |= {"connection": "close"}  # the body may have no end


# What the OpenAPI document says of a route that takes a FormDep.
_BINARY = {"type": "string", "format": "binary"}
_FORM_SCHEMA = {"type": "object", "required": ["file"], "properties": {"file": _BINARY, "purpose": {"type": "string"}}}
FILE_FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM_SCHEMA}}}}

_PART_SCHEMA = {"type": "object", "required": ["data"], "properties": {"data": _BINARY}}
PART_FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _PART_SCHEMA}}}}

FormDep = Annotated[Form, Depends(_form, scope="function")]
PartFormDep = Annotated[Form, Depends(_part_form, scope="function")]

# The id that a page of a list begins after.
AfterQuery = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
