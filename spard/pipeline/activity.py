"""Describe what a run does at the moment, in a phrase, with the remaining amount of work and time.

Only the standard library is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_S = 2.0  # before which a rate says little


class Activity:
    """Follows the messages of the kind `activity`; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing, self._began, self._last_done = "", 0.0, 0

    @property
    def is_known(self) -> bool:
        """True if the current activity is known."""
        return bool(self._doing)

    def end(self) -> None:
        """Forget the current activity."""
        self._doing = ""

    def describe(self, doing: str, done: int, total: int, *, at_most: bool = False) -> str:
        """Return the phrase; the remaining time follows from the rate since this activity began.

        `total` is 0 if the amount of work is not known; with `at_most` the work may end before `total`.
        """
        now = self._clock()
        if doing != self._doing or done < self._last_done:
            self._doing, self._began = doing, now
        self._last_done = done
        left, most = max(0, total - done), "at most " if at_most else ""
        if not left:
            return doing
        words, took_s = f"{doing}, {most}{left:,} left", now - self._began
        return f"{words}, {most or 'about '}{_duration(took_s * left / done)}" if done and took_s > _LEAST_S else words


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if seconds >= 120 else f"{max(1, round(seconds))} s"
