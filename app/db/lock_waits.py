"""Limit how long one request waits for SQLite's write lock in total, over all transactions it opens.

Another program can hold the lock for minutes, as a backup does. With a limit per transaction alone the waits add up: an
upload opens four. The limit belongs to the request's task and to the threads that it starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

ALONE_S = 30.0  # for one transaction, if no total limit is set


@dataclass
class _Allowance:
    left_s: float


_allowance: ContextVar[_Allowance | None] = ContextVar("lock_waits", default=None)


def limit_lock_waits(seconds: float) -> None:
    """Allow the current task, and tasks and threads started from now on, `seconds` of lock waits in total."""
    _allowance.set(_Allowance(seconds))


@contextmanager
def waiting() -> Iterator[float]:
    """Yield how many seconds the block may wait for the lock, and deduct the time it takes."""
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
    """Limit the lock waits within the block to `seconds`, instead of the request's limit."""
    token = _allowance.set(_Allowance(seconds))
    try:
        yield
    finally:
        _allowance.reset(token)
