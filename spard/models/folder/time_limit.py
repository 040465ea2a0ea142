"""A limit on the CPU time of a block, for programs of others that run in this process: chat templates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block once it has taken so much CPU time; in the main thread only.

    Python code is interrupted between two of its steps, a long call into a library when that returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError
