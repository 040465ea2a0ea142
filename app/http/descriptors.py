"""Raise the number of files and connections that a process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

_MOST = 65_536  # requested at most; ordinary load needs no more


def raise_limit() -> int:
    """Raise this process's limit on open descriptors as far as the system allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft
