"""How long one request waits in all for SQLite's write lock, over however many transactions it opens.

Another program can hold the lock for minutes, as a backup does. A limit for each transaction alone would add up: an
upload opens four. The limit belongs to the request's task and to the threads that it starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

ALONE_S = 30.0  # for one transaction, where nothing limits them together


@dataclass
class _Allowance:
    left_s: float


_allowance: ContextVar[_Allowance | None] = ContextVar("lock_waits", default=None)


def limit_lock_waits(seconds: float) -> None:
    """Let the current task, and what it starts from now on, wait so many seconds for the lock in all."""
    _allowance.set(_Allowance(seconds))


@contextmanager
def waiting() -> Iterator[float]:
    """Count the time that the block waits for the lock; the value is how many seconds it may wait."""
    allowance = _allowance.get()
    if allowance is None:
        yield ALONE_S
        return
    began = time.monotonic()
    try:
        yield max(allowance.left_s, 0.0)
    finally:
        allowance.left_s -= time.monotonic() - began


@contextmanager
def brief_lock_waits(seconds: float) -> Iterator[None]:
    """Let the block wait so many seconds at most for the lock, whatever the request may."""
    token = _allowance.set(_Allowance(seconds))
    try:
        yield
    finally:
        _allowance.reset(token)
