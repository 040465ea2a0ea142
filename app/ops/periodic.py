"""Repeat a task until the process stops; collect garbage in this way in processes that serve requests.

A full collection traverses all objects of open streams and requests while every request waits: 0.1 s with 600 streams.
Under load Python starts one each second. Here young objects are collected as usual, and the oldest generation only
every two minutes.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from threading import Event

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

    Call it once at the start, and leave the full collections to `run`.
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
