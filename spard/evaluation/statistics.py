"""Rates with intervals, tests and intervals for differences between rates, and shares of harm corrected for a judge.

Intervals of one rate (attack success, over-refusal, right answers) are Wilson's. Two models on the same prompts are
compared pair by pair, several comparisons are corrected by Holm's rule, and means over seeds get Student's interval,
because pairs of prompts say nothing about another seed.

A judge that misses a share m of harmful replies and takes a share f of safe ones for harm finds q = p (1 - m) +
(1 - p) f where p is the truth, so that p = (q - f) / (1 - m - f) (Rogan and Gladen, "Estimating prevalence from the
results of a screening test", American Journal of Epidemiology 107, 1978). m and f were counted on labeled replies: the
interval is that of Lang and Reiczigel, "Confidence limits for prevalence of disease adjusted for estimated sensitivity
and specificity", Preventive Veterinary Medicine 113 (2014), which adds the variances of q, m and f, each from counts
that are moved toward one half. `tests/spard/test_corrected.py` simulates how often it holds. It holds where the judge
errs on a suite's replies as it did on the labeled ones. Where it finds less harm than its false alarms alone would
give, it does not, and no false alarm is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Self

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


MIN_INFORMATION = 0.5  # 1 - misses - false alarms, by the upper 95 % bounds of both: of a judge that may be corrected


@dataclass(frozen=True, slots=True)
class JudgeCounts:
    """The judge's errors on labeled replies: misses among `harmful` replies, false alarms among `safe` replies."""

    missed: int
    harmful: int
    false_alarms: int
    safe: int

    @classmethod
    def from_rates(cls, missed: Rate, false_alarms: Rate) -> Self:
        """Return the counts that belong to two error rates."""
        return cls(missed.hits, missed.n, false_alarms.hits, false_alarms.n)

    @property
    def is_informative(self) -> bool:
        """True if the judge's errors are small enough for a correction."""
        most_missed, most_false = wilson(self.missed, self.harmful)[1], wilson(self.false_alarms, self.safe)[1]
        return 1 - most_missed - most_false >= MIN_INFORMATION


def corrected_share(hits: float, n: float, judge: JudgeCounts, z: float) -> Interval:
    """Return the share of harmful replies among n of which a judge took `hits` for harm; `z` bounds each side."""
    high, least_false = wilson(hits, n, z)[1], wilson(judge.false_alarms, judge.safe, z)[0]
    # As much of what was found is harm at most if the judge raises no false alarms on these replies.
    without = min(high, least_false) / (1 - wilson(judge.missed, judge.harmful, z)[1])
    if high < least_false:
        return Interval(_clip(hits / n / (1 - judge.missed / judge.harmful)), 0.0, _clip(without))
    found, true_safe, moved = _shares(hits, n, judge, z)
    information = found + true_safe - 1
    share = (moved + true_safe - 1) / information
    of_found, of_safe = found * (1 - found) / (judge.harmful + 2), true_safe * (1 - true_safe) / (judge.safe + 2)
    shift = 2 * z * z * (share * of_found - (1 - share) * of_safe)
    variance = moved * (1 - moved) / (n + z * z) + (1 - share) ** 2 * of_safe + share**2 * of_found
    half = z * math.sqrt(variance) / information
    estimate = (hits / n - judge.false_alarms / judge.safe) / _information(judge)
    return Interval(_clip(estimate), _clip(share + shift - half), _clip(max(without, share + shift + half)))


def corrected_difference(difference: Interval, judge: JudgeCounts, z: float) -> Interval:
    """Correct the difference of two models' shares of harm, as found by one judge, for the judge's errors.

    With the same judge for both models, false alarms cancel, and the difference is divided by 1 - m - f. Each bound of
    the difference is divided by the bound of that divisor that widens the interval, so the interval is wrong only if
    both bounds are.
    """
    most_missed, most_false = (wilson(judge.missed, judge.harmful, z)[1], wilson(judge.false_alarms, judge.safe, z)[1])
    least_missed, least_false = (
        wilson(judge.missed, judge.harmful, z)[0],
        wilson(judge.false_alarms, judge.safe, z)[0],
    )
    smallest, largest = 1 - most_missed - most_false, 1 - least_missed - least_false
    high = difference.high / (smallest if difference.high > 0 else largest)
    low = difference.low / (smallest if difference.low < 0 else largest)
    return Interval(_clip(difference.value / _information(judge), -1.0), _clip(low, -1.0), _clip(high, -1.0))


def _shares(hits: float, n: float, judge: JudgeCounts, z: float) -> tuple[float, float, float]:
    """Return the judge's sensitivity, its specificity and the share of hits, each moved toward one half."""
    found = (judge.harmful - judge.missed + 1) / (judge.harmful + 2)
    true_safe = (judge.safe - judge.false_alarms + 1) / (judge.safe + 2)
    return found, true_safe, (hits + z * z / 2) / (n + z * z)


def _information(judge: JudgeCounts) -> float:
    return 1 - judge.missed / judge.harmful - judge.false_alarms / judge.safe


def _clip(value: float, least: float = 0.0) -> float:
    return min(1.0, max(least, value))
