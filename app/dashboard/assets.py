"""Style sheets and scripts, named with their digest so that browsers can cache them forever."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from app.errors import NotFound

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "jsonl": "application/jsonl",
    "svg": "image/svg+xml",
}
_PLACES = {
    "spard.css": ("app.jobs.reports", "templates"),  # shared with the HTML report
    "dashboard.css": ("app.dashboard", "static"),
    "dashboard.js": ("app.dashboard", "static"),
    "example.jsonl": ("app.dashboard", "static"),
    "icon.svg": ("app.dashboard", "static"),
    "htmx.min.js": ("app.dashboard", "static"),
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that pages link to."""

    name: str  # including its digest
    media_type: str
    content: bytes
    gzipped: bytes


def _read(name: str) -> Asset:
    package, folder = _PLACES[name]
    content = (files(package) / folder / name).read_bytes()
    stem, _, ending = name.rpartition(".")
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Asset(f"{stem}.{digest}.{ending}", _MEDIA_TYPES[ending], content, gzip.compress(content, mtime=0))


_ASSETS: Mapping[str, Asset] = {name: _read(name) for name in _PLACES}
_BY_NAME = {asset.name: asset for asset in _ASSETS.values()}


def url(name: str) -> str:
    """Return the URL of a file, given its name without digest."""
    return f"/static/{_ASSETS[name].name}"


def find(name: str) -> Asset:
    """Return the file with this name, digest included; raise `NotFound` if there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise NotFound("No such file.", code="unknown_url") from None
