"""For how long a job computes: its GPU time is counted while its child works, and not while it waits for anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

STORAGE, JUDGE = "storage", "judge"  # what a job may wait for


class Meter:
    """Measures the idle seconds of one attempt, which heartbeats subtract. It begins paused; any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._what: str | None = STORAGE
        self._since = self._changed_at = clock()  # until when idle time was taken; when it last began to compute
        self._idle_s = 0.0

    @property
    def wait_reason(self) -> str | None:
        """What keeps the job from computing; None while it computes."""
        return self._what

    def pause(self, what: str, lost_s: float = 0.0) -> None:
        """Stop counting, because of `what`; the last `lost_s` seconds of computing were spent in waiting too."""
        with self._lock:
            if self._what is None:
                self._since = max(self._changed_at, self._clock() - lost_s)
            self._what = what

    def resume(self) -> None:
        """Count from now on."""
        with self._lock:
            self._add()
            self._what, self._changed_at = None, self._clock()

    def take(self) -> float:
        """Return the idle seconds that nobody has taken yet."""
        with self._lock:
            self._add()
            idle_s, self._idle_s = self._idle_s, 0.0
            return idle_s

    def give_back(self, idle_s: float) -> None:
        """Keep idle seconds that were taken, and could not be stored, for the next time."""
        with self._lock:
            self._idle_s += idle_s

    def _add(self) -> None:
        now = self._clock()
        if self._what is not None:
            self._idle_s += now - self._since
            self._since = now
