"""An object as a response: sent on to S3 where the storage signs links, streamed with Range support otherwise."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response, StreamingResponse

from app.errors import AppError
from app.openapi import ErrorOut
from app.storage import Storage

# What the OpenAPI document says of a route that answers with an object.
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": _BYTES},
    206: {"description": "The range of bytes that was asked for.", "content": _BYTES},
    302: {"description": "Where the storage has the bytes, for a while."},
    416: {"description": "The range lies outside of the bytes.", "model": ErrorOut},
}

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def download(
    storage: Storage, key: str, filename: str, sha256: str, headers: Headers, ttl_s: int, mime: str | None = None
) -> Response:
    """The whole object, or the one range that was asked for."""
    if url := storage.presigned_url(key, filename, ttl_s):
        return RedirectResponse(url, status_code=302)
    size, etag = storage.size(key), f'"{sha256}"'
    asked = headers.get("range") if headers.get("if-range", etag) == etag else None
    start, end = _range(asked, size)
    sent = {
        "accept-ranges": "bytes",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(filename)}",
        "content-length": str(end - start),
        "etag": etag,
        "x-content-type-options": "nosniff",
    }
    is_part = (start, end) != (0, size)
    if is_part:
        sent["content-range"] = f"bytes {start}-{end - 1}/{size}"
    media = mime or "application/octet-stream"
    return StreamingResponse(storage.chunks(key, start, end), 206 if is_part else 200, sent, media)


def _range(asked: str | None, size: int) -> tuple[int, int]:
    """From where to where; several ranges at once are answered by the whole, as RFC 9110 allows."""
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
