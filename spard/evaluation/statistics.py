"""Tests and intervals for differences between rates.

Intervals of one rate are Wilson's (`spard.evaluation.rates`). Two models on the same prompts are compared pair by pair,
several comparisons are corrected by Holm's rule, and means over seeds get Student's interval, because pairs of prompts
say nothing about another seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from spard.evaluation.rates import Z95, wilson


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the bounds of its interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True if both bounds are on one side of 0: the difference is significant at the interval's level."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts of two yes-or-no outcomes of the same items: both, only the first, only the second, neither."""

    both: int
    first: int
    second: int
    neither: int

    @property
    def n(self) -> int:
        """The number of items, concordant and discordant."""
        return self.both + self.first + self.second + self.neither


def count_pairs(first: Sequence[bool], second: Sequence[bool]) -> Pairs:
    """Count the four combinations of two outcomes over items in the same order."""
    seen = list(zip(first, second, strict=True))
    return Pairs(*(seen.count(outcome) for outcome in ((True, True), (True, False), (False, True), (False, False))))


def rule_of_three(n: int) -> float:
    """Return the upper 95 % bound of a rate if none of n items was a hit: 3 / n, since (1 - 3/n)^n is about 0.05."""
    return min(1.0, 3 / n) if n else 1.0


def mcnemar(pairs: Pairs) -> float:
    r"""Return the exact two-sided p value of the hypothesis that both outcomes are equally frequent (McNemar, 1947).

    Given b + c discordant items, b is binomial with probability 1/2:
    p = min(1, 2 sum_{i <= min(b, c)} C(b+c, i) / 2^(b+c)).
    """
    discordant, fewer = pairs.first + pairs.second, min(pairs.first, pairs.second)
    tail = sum(math.comb(discordant, i) for i in range(fewer + 1))
    both_tails: float = 2 * tail / 2**discordant
    return min(1.0, both_tails)


def paired_difference(pairs: Pairs, z: float = Z95) -> Interval:
    r"""Return the first rate minus the second on the same items, with Newcombe's (1998) interval, method 10.

    With Wilson's bounds l_i, u_i and the items' correlation phi:
    d - sqrt((p1-l1)^2 - 2 phi (p1-l1)(u2-p2) + (u2-p2)^2)  to  d + sqrt((u1-p1)^2 - 2 phi (u1-p1)(p2-l2) + (p2-l2)^2).
    """
    if pairs.n == 0:
        return Interval(0.0, -1.0, 1.0)
    hits1, hits2 = pairs.both + pairs.first, pairs.both + pairs.second
    p1, p2 = hits1 / pairs.n, hits2 / pairs.n
    (l1, u1), (l2, u2) = wilson(hits1, pairs.n, z), wilson(hits2, pairs.n, z)
    phi = _correlation(pairs)
    below = math.sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    above = math.sqrt((u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2)
    return Interval(p1 - p2, p1 - p2 - below, p1 - p2 + above)


def is_not_inferior(pairs: Pairs, margin: float) -> bool:
    """Return True if the first rate is less than `margin` below the second: one-sided at 5 %, paired interval."""
    return paired_difference(pairs, z=1.644854).low > -margin


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values to bound the chance of any false claim (Holm, 1979).

    In ascending order p_(j) becomes max_{i <= j} min(1, (m - i + 1) p_(i)).
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def conformal_p_value(value: float, references: Sequence[float]) -> float:
    """Return the conformal p-value of a value against references: (1 + references at least as large) / (1 + all).

    If value and references are exchangeable, a p-value of at most a has a probability of at most a. The smallest
    p-value that n references can give is 1 / (n + 1): 99 are needed for 1 %.
    """
    return (1 + sum(each >= value for each in references)) / (1 + len(references))


def over_seeds(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean over seeds with Student's interval, mean -+ t_{n-1} s / sqrt(n); infinite bounds for one seed."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = student_quantile((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def student_quantile(p: float, df: int) -> float:
    """Return the t with P(T <= t) = p for Student's T with `df` degrees of freedom, p in [0.5, 1)."""
    return _root(lambda t: _student(t, df) - p, 0.0, 1e6)


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Return Cohen's (1960) kappa, the agreement of two judges beyond chance: (p_o - p_e) / (1 - p_e).

    None if there are no items or chance alone explains the agreement (p_e = 1).
    """
    n = len(first)
    if n == 0:
        return None
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    yes1, yes2 = sum(first) / n, sum(second) / n
    expected = yes1 * yes2 + (1 - yes1) * (1 - yes2)
    return (observed - expected) / (1 - expected) if expected < 1 else None


def kappa_interval(pairs: Pairs) -> Interval | None:
    """Return Cohen's kappa with a 95 % interval: Wilson's of the observed agreement, rescaled by the chance agreement.

    The chance agreement is taken as known. Unlike Cohen's standard error, this is not 0 for full agreement. None as in
    `kappa`.
    """
    n, same = pairs.n, pairs.both + pairs.neither
    if n == 0:
        return None
    yes1, yes2 = (pairs.both + pairs.first) / n, (pairs.both + pairs.second) / n
    expected = yes1 * yes2 + (1 - yes1) * (1 - yes2)
    if expected >= 1:
        return None
    low, high = wilson(same, n)
    return Interval(*((share - expected) / (1 - expected) for share in (same / n, low, high)))


def _correlation(pairs: Pairs) -> float:
    """Return Newcombe's phi: a positive covariance is lowered by n / 2, but not below zero."""
    rows = (pairs.both + pairs.first) * (pairs.second + pairs.neither)
    columns = (pairs.both + pairs.second) * (pairs.first + pairs.neither)
    covariance: float = pairs.both * pairs.neither - pairs.first * pairs.second
    if covariance > 0:
        covariance = max(covariance - pairs.n / 2, 0.0)
    return covariance / math.sqrt(rows * columns) if rows and columns else 0.0


def _student(t: float, df: int) -> float:
    """Return P(T <= t) for t >= 0 in closed form (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(df))
    odd = df % 2
    term = math.cos(theta) if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * math.cos(theta) ** 2
        total += term
    central = (theta + math.sin(theta) * total) * 2 / math.pi if odd else math.sin(theta) * total
    return (1 + central) / 2


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of an increasing function by bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
