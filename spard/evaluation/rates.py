"""Rates with their intervals: attack success, over-refusal, right answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Rate:
    """A share with its 95 % Wilson interval: `hits` of `n` scored items; unscored items are neither hits nor misses."""

    hits: int
    n: int
    unscored: int
    rate: float | None  # None: nothing was scored
    low: float
    high: float


def wilson(hits: float, n: float, z: float = Z95) -> tuple[float, float]:
    r"""Return the score interval of a proportion (Wilson, 1927); (0, 1) if n is 0.

        (k + z^2/2) / (n + z^2) -+ z / (n + z^2) sqrt(k (n - k) / n + z^2 / 4)

    `hits` may be a sum of n values from 0 to 1; these vary no more than yes or no, so the interval is wide enough.
    """
    if n == 0:
        return 0.0, 1.0
    center = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return (0.0 if hits == 0 else center - half), (1.0 if hits == n else center + half)


def rate(hits: int, n: int, unscored: int = 0) -> Rate:
    """Return the share of hits among n scored items with its 95 % interval."""
    low, high = wilson(hits, n)
    return Rate(hits, n, unscored, hits / n if n else None, low, high)


def difference_bounds(first: tuple[float, float], second: tuple[float, float], z: float = Z95) -> tuple[float, float]:
    """Return the bounds of the first rate minus the second (Newcombe, 1998, method 10); 95 % by default.

    Rates are given as (hits, n), both n positive. They are treated as independent, which makes the interval wider than
    necessary if both models were asked the same prompts.
    """
    (hits1, n1), (hits2, n2) = first, second
    p1, p2 = hits1 / n1, hits2 / n2
    (l1, u1), (l2, u2) = wilson(hits1, n1, z), wilson(hits2, n2, z)
    return p1 - p2 - math.hypot(p1 - l1, u2 - p2), p1 - p2 + math.hypot(u1 - p1, p2 - l2)
