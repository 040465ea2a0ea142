"""When a process that serves requests collects garbage.

A collection of the oldest objects looks at all that the open streams and requests hold, and every request waits for it:
0.1 s with 600 streams. Python would begin one each second under load. Here the young are collected as ever, and the
oldest at fixed times.
"""

from __future__ import annotations

import gc
import sys
from threading import Event

from app.ops.periodic import repeat

_EVERY_S = 120.0
_NEVER = 1 << 30  # collections of the younger ones before one of the oldest
_SWITCH_S = 0.0005  # that a thread which computes keeps the event loop waiting; Python's own default is ten times that


def spare_requests() -> None:
    """Exempt what exists now from collection, leave the oldest objects to `run`, and let threads take turns sooner."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    sys.setswitchinterval(_SWITCH_S)


def run(stop: Event) -> None:
    """Collect the oldest objects every two minutes, where `spare_requests` was called."""
    if gc.get_threshold()[2] == _NEVER:
        repeat(gc.collect, stop, _EVERY_S, "garbage could not be collected")
