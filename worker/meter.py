"""Measure how long a job's child computes, so that GPU time does not include time spent waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

STORAGE, JUDGE = "storage", "judge"  # what a job may wait for


class Meter:
    """Measures the idle seconds of one attempt, which heartbeats subtract from its GPU time.

    It begins paused, waiting for the storage. All methods may be called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._what: str | None = STORAGE
        # `_since`: idle time until here is counted. `_changed_at`: when computing last began.
        self._since = self._changed_at = clock()
        self._idle_s = 0.0

    @property
    def wait_reason(self) -> str | None:
        """Why the job does not compute (`STORAGE` or `JUDGE`); None while it computes."""
        return self._what

    def pause(self, what: str, lost_s: float = 0.0) -> None:
        """Begin idle time because of `what`; the last `lost_s` seconds count as idle too, but none before `resume`."""
        with self._lock:
            if self._what is None:
                self._since = max(self._changed_at, self._clock() - lost_s)
            self._what = what

    def resume(self) -> None:
        """End the idle time: the job computes from now on."""
        with self._lock:
            self._add()
            self._what, self._changed_at = None, self._clock()

    def idle_seconds(self) -> float:
        """Return the idle seconds of the attempt up to now."""
        with self._lock:
            self._add()
            return self._idle_s

    def _add(self) -> None:
        now = self._clock()
        if self._what is not None:
            self._idle_s += now - self._since
            self._since = now
