"""Hear of the end before it comes: servers wait for open answers before they tell the application that they stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def when_told_to_stop(tell: Callable[[], object]) -> None:
    """Call `tell` on SIGINT and SIGTERM, and then whatever handled them before.

    Only a process's main thread can hear signals: in any other one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        signal.signal(number, _told(tell, signal.getsignal(number)))


def _told(tell: Callable[[], object], before: object) -> Callable[[int, FrameType | None], None]:
    def handle(number: int, frame: FrameType | None) -> None:
        tell()
        if callable(before):
            before(number, frame)

    return handle
