"""Measure how long a job's child computes, so that GPU time does not include time spent waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

STORAGE, JUDGE = "storage", "judge"  # what a job may wait for


class Meter:
    """Measures the seconds for which one attempt computes: its GPU time.

    It begins paused, waiting for the storage. All methods may be called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._what: str | None = STORAGE
        self._computed_s, self._resumed_at = 0.0, clock()  # the sum until computing last began, and when that was

    @property
    def wait_reason(self) -> str | None:
        """Why the job does not compute (`STORAGE` or `JUDGE`); None while it computes."""
        return self._what

    def pause(self, what: str, lost_s: float = 0.0) -> None:
        """Begin idle time because of `what`; the last `lost_s` seconds count as idle too, but none before `resume`."""
        with self._lock:
            if self._what is None:
                self._computed_s += max(0.0, self._clock() - self._resumed_at - lost_s)
            self._what = what

    def resume(self) -> None:
        """End the idle time: the job computes from now on."""
        with self._lock:
            self._computed_s, self._what, self._resumed_at = self._sum(), None, self._clock()

    def computed_seconds(self) -> float:
        """Return the seconds for which the attempt has computed up to now."""
        with self._lock:
            return self._sum()

    def _sum(self) -> float:
        return self._computed_s + (self._clock() - self._resumed_at if self._what is None else 0.0)
