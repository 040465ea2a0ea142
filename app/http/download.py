"""Send a stored object: as a link to S3 if clients can reach it, otherwise streamed with Range support."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response, StreamingResponse

from app.errors import AppError
from app.http.lanes import Share
from app.http.openapi import ErrorOut
from app.storage import Storage

# The OpenAPI responses of a route that sends an object.
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": _BYTES},
    206: {"description": "The requested range of bytes.", "content": _BYTES},
    302: {"description": "A temporary address of the file in the storage."},
    416: {"description": "The range is outside the file.", "model": ErrorOut},
}

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class Attachment:
    """An object to send: its storage key, file name, digest and MIME type."""

    key: str
    filename: str
    sha256: str
    mime: str = "application/octet-stream"


def download(storage: Storage, what: Attachment, headers: Headers, link_s: int | None, reads: Share) -> Response:
    """Return a redirect to a link valid for `link_s` seconds, or stream the object or the requested range.

    With `link_s` None, or a storage without links, the object is streamed through the lane `reads`. `headers` are those
    of the request, for `Range` and `If-Range`. Raises 416 for a range outside of the object.
    """
    if link_s is not None and (url := storage.presigned_url(what.key, what.filename, link_s)):
        return RedirectResponse(url, status_code=302)
    size, etag = storage.size(what.key), f'"{what.sha256}"'
    # By RFC 9110, a range is ignored if the client's copy is of another version.
    asked = headers.get("range") if headers.get("if-range", etag) == etag else None
    start, end = _range(asked, size)
    sent = {
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(what.filename)}",
        "content-length": str(end - start),
        "etag": etag,
        "x-content-type-options": "nosniff",
    }
    is_part = (start, end) != (0, size)
    if is_part:
        sent["content-range"] = f"bytes {start}-{end - 1}/{size}"
    chunks = reads.chunks(storage.chunks(what.key, start, end))
    return StreamingResponse(chunks, 206 if is_part else 200, sent, what.mime)


def _range(asked: str | None, size: int) -> tuple[int, int]:
    """Return the start and end of the requested range; several ranges get the whole object, as RFC 9110 allows."""
    match = _RANGE.fullmatch(asked.strip()) if asked else None
    if match is None or not any(match.groups()):
        return 0, size
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    if start >= end:
        raise AppError(f"The range {asked} lies outside of {size} bytes.", code="range_not_satisfiable", status=416)
    return start, end
