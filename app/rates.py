"""How fast a project may ask: a bucket of requests that fills up again steadily, for one process.

Buckets are in this process's memory: with several API processes a project may ask that many times as fast, and a
restart fills every bucket. Limits that must hold exactly are quotas, which are counted in the database.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from threading import Lock

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Taken:
    """How the bucket stands after a request, and when it is full again."""

    is_allowed: bool
    limit: int
    remaining: int
    reset_s: float
    retry_after_s: int

    def headers(self) -> dict[str, str]:
        """As OpenAI sends them."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": _duration(self.reset_s),
        }


class Rates:
    """One bucket for each project that has asked."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # what is left, and when that was so

    def take(self, project_id: str, per_minute: int) -> Taken:
        """Take one request out of a project's bucket, if there is one."""
        now, speed = time.monotonic(), per_minute / _MINUTE_S
        with self._lock:
            left, at = self._buckets.get(project_id, (float(per_minute), now))
            left = min(per_minute, left + speed * (now - at))
            is_allowed = left >= 1
            left -= is_allowed
            self._buckets[project_id] = (left, now)
        wait_s = 0 if is_allowed else max(1, math.ceil((1 - left) / speed))
        return Taken(is_allowed, per_minute, int(left), (per_minute - left) / speed, wait_s)


def _duration(seconds: float) -> str:
    """OpenAI's form: 12ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
