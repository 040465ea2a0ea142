"""A CPU time limit for untrusted programs that run in this process: chat templates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` inside the block after so many seconds of CPU time; only in the main thread.

    Python code is interrupted between two bytecodes; a long library call only when it returns.
    """
    # Python delivers signals to the main thread only, so other threads run without a limit.
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
