"""Dependencies for uploads: the multipart form as it arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Annotated

from fastapi import Depends, Request

from app.deps import KeyDep, LimitsDep, SettingsDep
from app.errors import TooLarge, UnsupportedMedia
from app.files.validation import Limits
from app.http import bodies
from app.http.multipart import Form
from app.http.slots import Slots
from app.keys.service import Principal
from app.settings import Settings
from app.uploads.parts import PART_BYTES

_FORM_BYTES = 1 << 20  # a form may exceed its file by this much
_DRAIN_BYTES = 16 << 20


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
