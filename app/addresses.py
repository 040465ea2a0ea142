"""Addresses of endpoints that get a key of the deployment: compared, never guessed at."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def is_listed(url: str, listed: Iterable[str]) -> bool:
    """Whether a URL is one of those listed: same scheme, host, port and path; a slash at the end makes no difference.

    A URL that cannot be read, or that has a user name, a query or a fragment, is none of them.
    """
    wanted = _parts(url)
    return wanted is not None and any(wanted == _parts(each) for each in listed)


def _parts(url: str) -> tuple[str, str, int | None, str] | None:
    try:
        found = urlsplit(url)
        port = found.port or _PORTS.get(found.scheme)
    except ValueError:
        return None
    if "@" in found.netloc or found.query or found.fragment or not found.hostname:
        return None
    return found.scheme, found.hostname, port, found.path.rstrip("/")
