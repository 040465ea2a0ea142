"""Compare the addresses of endpoints that receive one of the deployment's API keys."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def is_listed(url: str, listed: Iterable[str]) -> bool:
    """Return True if a URL equals one of `listed` in scheme, host, port and path; a trailing slash does not matter.

    A URL that cannot be parsed, or that has a user name, a query or a fragment, matches nothing.
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
