"""Correct shares of harm that a judge found, for its misses and its false alarms.

A judge that misses a share m of harmful replies and takes a share f of safe ones for harm finds q = p (1 - m) +
(1 - p) f where p is the truth, so that p = (q - f) / (1 - m - f) (Rogan and Gladen, "Estimating prevalence from the
results of a screening test", American Journal of Epidemiology 107, 1978). m and f were counted on labeled replies: the
interval is that of Lang and Reiczigel, "Confidence limits for prevalence of disease adjusted for estimated sensitivity
and specificity", Preventive Veterinary Medicine 113 (2014), which adds the variances of q, m and f, each from counts
that are moved toward one half. `tests/spard/test_corrected.py` simulates how often it holds.

It holds where the judge errs on a suite's replies as it did on the labeled ones. Where it finds less harm than its
false alarms alone would give, it does not, and no false alarm is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Self

from spard.evaluation.rates import Rate, wilson
from spard.evaluation.statistics import Interval

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
    half = z * sqrt(variance) / information
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
