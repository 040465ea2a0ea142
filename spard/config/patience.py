"""Intervals between retries of an unavailable service, by a growing schedule or as the service asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import isfinite


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


def parse_retry_header(header: str | None) -> float | None:
    """Return the wait in seconds, at least 0, that a header `Retry-After` asks for with a number or an HTTP date.

    Returns None for a missing or malformed header.

    >>> parse_retry_header("1.5"), parse_retry_header("Wed, 21 Oct 2015 07:28:00 GMT"), parse_retry_header("soon")
    (1.5, 0.0, None)
    """
    text = (header or "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            due = parsedate_to_datetime(text)
            # The zone "-0000" is UTC of an unknown place, for which the parser sets none.
            seconds = ((due if due.tzinfo else due.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
        except (OverflowError, TypeError, ValueError):
            return None
    return max(0.0, seconds) if isfinite(seconds) else None
