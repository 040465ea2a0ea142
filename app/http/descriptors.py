"""How many files and connections a process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

_MOST = 65_536  # that are asked for; more would only be for floods


def raise_limit() -> int:
    """Let this process open as many descriptors as the system allows it; return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft
