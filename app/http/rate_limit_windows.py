"""Windows of this process, counted in its memory.

The memory of the library `limits` starts a thread for a count, to look for windows that are over; that costs a request
more than all else that is done about limits. Here a window that is over is begun anew when it is next counted in.
"""

from __future__ import annotations

import math
import time
from threading import Lock

from limits.storage.base import Storage

KEPT = 10_000  # windows


class WindowsInMemory(Storage):
    """Counts by key, each for the seconds that its first count names."""

    STORAGE_SCHEME = None

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._windows: dict[str, tuple[int, float]] = {}  # the count, and the monotonic time of its end

    @property
    def base_exceptions(self) -> type[Exception]:
        """Nothing that is raised here is the storage's own."""
        return ValueError

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Count in a window, which lasts `expiry` seconds if it is new, and return its count."""
        now = time.monotonic()
        with self._lock:
            count, end = self._windows.get(key, (0, -math.inf))
            if end <= now:
                self._make_room(now)
                count, end = 0, now + expiry
            self._windows[key] = count + amount, end
            return count + amount

    def get(self, key: str) -> int:
        """Return the count of a window; 0 for one that is over."""
        count, end = self._windows.get(key, (0, 0.0))
        return count if end > time.monotonic() else 0

    def get_expiry(self, key: str) -> float:
        """Return when a window is over in Unix seconds, as the library counts; now for one that is.

        Windows are kept by the monotonic clock, so that a clock that is set back lengthens none.
        """
        return time.time() + max(self._windows.get(key, (0, 0.0))[1] - time.monotonic(), 0.0)

    def check(self) -> bool:
        """Return True: memory is always available."""
        return True

    def reset(self) -> int:
        """Forget all windows and return how many there were."""
        with self._lock:
            count = len(self._windows)
            self._windows.clear()
        return count

    def clear(self, key: str) -> None:
        """Forget a window."""
        with self._lock:
            self._windows.pop(key, None)

    def _make_room(self, now: float) -> None:
        """Thousands of ids a minute: forget those that are over, and all if that is not enough, rather than grow."""
        if len(self._windows) >= KEPT:
            self._windows = {key: window for key, window in self._windows.items() if window[1] > now}
        if len(self._windows) >= KEPT:
            self._windows.clear()
