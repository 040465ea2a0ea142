"""Intervals between retries of something that is unavailable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits that double from `first_s` up to `longest_s` and sum to `limit_s`, all in seconds."""

    limit_s: float = 0.0
    first_s: float = 1.0
    longest_s: float = 60.0

    def waits(self) -> Iterator[float]:
        """Yield the wait in seconds before each retry, until the limit is reached.

        >>> list(Patience(limit_s=10.0, first_s=1.0, longest_s=4.0).waits())
        [1.0, 2.0, 4.0, 3.0]
        """
        waited, wait = 0.0, self.first_s
        while waited < self.limit_s:
            now = min(wait, self.longest_s, self.limit_s - waited)
            yield now
            waited, wait = waited + now, 2 * wait
