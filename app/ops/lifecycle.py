"""What a process does until it stops: repeat tasks, collect garbage between requests, and end on SIGINT and SIGTERM.

A full garbage collection traverses all objects of open streams and requests while every request waits: 0.1 s with 600
streams. Under load Python starts one each second. In processes that serve requests young objects are collected as
usual, and the oldest generation only every two minutes.

Python runs the handlers of signals in the main thread only.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from types import FrameType
from typing import TypeVar

log = logging.getLogger(__name__)
_EVERY_S = 120.0
_NEVER = 1 << 30  # threshold of the oldest generation, which is never reached
_SWITCH_S = 0.0005  # how long a computing thread may delay the event loop; Python's default is ten times as long


def repeat(task: Callable[[], object], stop: Event, every_s: float, failure: str) -> None:
    """Call `task` every `every_s` seconds, in the caller's thread, until `stop` is set.

    An exception is logged with the message `failure` and does not end the loop, because a database or a broker may be
    away for a moment. The first call comes after the first interval.
    """
    while not stop.wait(every_s):
        try:
            task()
        except Exception:
            log.exception(failure)


def spare_requests() -> None:
    """Exempt all current objects from collection, turn off automatic full collections, and switch threads faster.

    Call it once at the start, and leave the full collections to `collect_garbage`.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    sys.setswitchinterval(_SWITCH_S)


def collect_garbage(stop: Event) -> None:
    """Run a full collection every two minutes until `stop` is set, if `spare_requests` was called."""
    if gc.get_threshold()[2] == _NEVER:
        repeat(gc.collect, stop, _EVERY_S, "garbage could not be collected")


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
