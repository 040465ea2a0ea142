"""Count rate limit windows in this process's memory.

The memory storage of the library `limits` starts a thread to look for expired windows, which costs more than all other
work on limits. Here an expired window is restarted when it is next counted in.
"""

from __future__ import annotations

import math
import time
from threading import Lock

from limits.storage.base import Storage

KEPT = 10_000  # windows


class WindowsInMemory(Storage):
    """Counts by key, each for the number of seconds given with its first count."""

    STORAGE_SCHEME = None

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._windows: dict[str, tuple[int, float]] = {}  # the count, and the monotonic time of its end

    @property
    def base_exceptions(self) -> type[Exception]:
        """The errors of the storage itself; it raises none."""
        return ValueError

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Add to a window's count and return it; a new window lasts `expiry` seconds."""
        now = time.monotonic()
        with self._lock:
            count, end = self._windows.get(key, (0, -math.inf))
            if end <= now:
                self._make_room(now)
                count, end = 0, now + expiry
            self._windows[key] = count + amount, end
            return count + amount

    def get(self, key: str) -> int:
        """Return the count of a window; 0 if it has expired."""
        count, end = self._windows.get(key, (0, 0.0))
        return count if end > time.monotonic() else 0

    def get_expiry(self, key: str) -> float:
        """Return the end of a window in Unix seconds, as the library expects; now for an expired one.

        Windows are kept by the monotonic clock, so setting the clock back does not extend them.
        """
        return time.time() + max(self._windows.get(key, (0, 0.0))[1] - time.monotonic(), 0.0)

    def check(self) -> bool:
        """Return True: memory is always available."""
        return True

    def reset(self) -> int:
        """Delete all windows and return their number."""
        with self._lock:
            count = len(self._windows)
            self._windows.clear()
        return count

    def clear(self, key: str) -> None:
        """Delete a window."""
        with self._lock:
            self._windows.pop(key, None)

    def _make_room(self, now: float) -> None:
        """Delete expired windows if there are too many, and all windows if that does not suffice."""
        if len(self._windows) >= KEPT:
            self._windows = {key: window for key, window in self._windows.items() if window[1] > now}
        if len(self._windows) >= KEPT:
            self._windows.clear()
