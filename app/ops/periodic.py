"""Repeat a task until the process stops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

log = logging.getLogger(__name__)


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
