"""Work that is done again and again, in a thread of its own, until the process stops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event

log = logging.getLogger(__name__)


def repeat(task: Callable[[], object], stop: Event, every_s: float, failure: str) -> None:
    """Call `task` every `every_s` seconds until `stop` is set.

    An exception is logged under the message `failure` and does not end the loop: what went wrong may be a database or
    a broker that is away for a moment.
    """
    while not stop.wait(every_s):
        try:
            task()
        except Exception:
            log.exception(failure)
