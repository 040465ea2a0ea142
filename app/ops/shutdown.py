"""Stop on SIGINT and SIGTERM, whose handlers Python runs in the main thread only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 1.0

Result = TypeVar("Result")


def until_told(work: Callable[[], Result], end: Callable[[], object]) -> Result:
    """Run `work` in another thread, which no signal interrupts, and return its result; SIGINT and SIGTERM call `end`.

    The main thread waits in intervals of a second: a signal that comes just before a wait, or that the system delivers
    to another thread, does not end the wait, so its handler runs after the interval. The former handlers are restored
    at the end.
    """
    before = {number: signal.signal(number, lambda number, frame: end()) for number in _SIGNALS}
    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            running = pool.submit(work)
            while wait([running], timeout=_LOOK_S).not_done:
                pass
            return running.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def when_told_to_stop(tell: Callable[[], object]) -> None:
    """Call `tell` on SIGINT and SIGTERM, before the former handler; do nothing outside the main thread.

    A server tells the application that it stops only after all open responses have ended; this comes before that.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        signal.signal(number, _make_handler(tell, signal.getsignal(number)))


def _make_handler(tell: Callable[[], object], before: object) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        tell()
        if callable(before):
            before(number, frame)

    return handle
