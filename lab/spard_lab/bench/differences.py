"""Paired differences between two arms, with two intervals, and p values corrected for multiple comparisons.

Pairs are prompts of the same seed, so differences between labs do not widen the intervals. The interval of the prompts
(Newcombe) is about these very models; the interval of the seeds (Student) is about models in general, and exists if
several seeds differ. A difference that is the same on every seed has no interval of the seeds: its spread of 0 suggests
a certainty that few seeds cannot give, so only the interval of the prompts is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spard.evaluation.results import SuiteResult
from spard.evaluation.statistics import (
    Interval,
    Pairs,
    count_pairs,
    holm,
    is_not_inferior,
    mcnemar,
    over_seeds,
    paired_difference,
)
from spard_lab.bench.measure import Measurement

MARGIN = 0.01  # a share of right answers that a defense may cost
LEVEL = 0.05  # significance level of p values after Holm's correction
FIGURES = ("asr", "over_refusal", "accuracy")

Outcomes = tuple[list[bool], list[bool]]
Arm = Mapping[int, Measurement]
"""The measurements of one method on one attack, by seed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of one arm minus the other's, as a share from -1 to 1; `p` is McNemar's, uncorrected."""

    pairs: Pairs
    of_prompts: Interval
    of_seeds: Interval | None
    p: float

    @property
    def value(self) -> float:
        """The difference over all prompts."""
        return self.of_prompts.value

    @property
    def is_kept(self) -> bool:
        """True if the first rate is shown to be at most `MARGIN` below the second."""
        return is_not_inferior(self.pairs, MARGIN)

    def text(self) -> str:
        """Return the difference in points with its intervals."""
        seeds = f", seeds {_bounds(self.of_seeds)}" if self.of_seeds else ""
        return f"{100 * self.value:.1f} {_bounds(self.of_prompts)}{seeds}"

    def is_shown(self, corrected: float) -> bool:
        """Return True if the corrected p value is significant and the interval of the seeds, if any, excludes 0."""
        return corrected < LEVEL and (self.of_seeds is None or self.of_seeds.excludes_zero)


def compare(first: Arm, second: Arm) -> dict[str, Difference]:
    """Return the differences of two arms by figure, over the seeds and prompts of both."""
    by_seed = [_outcomes(first[seed], second[seed]) for seed in first.keys() & second.keys()]
    return {
        figure: difference([each[figure] for each in by_seed if figure in each])
        for figure in FIGURES
        if any(figure in each for each in by_seed)
    }


def correct_p_values(found: Sequence[Difference]) -> list[float]:
    """Return the p values of all comparisons of a table after Holm's correction."""
    return holm([each.p for each in found])


def _outcomes(first: Measurement, second: Measurement) -> dict[str, Outcomes]:
    """Return both arms' outcomes on the same prompts, by figure; prompts unscored in either are left out."""
    found: dict[str, Outcomes] = {}
    for result in first.results:
        figure = suite_column(result, first)
        one, two = pair_hits(first, second, result.suite)
        if figure and one:
            own, other = found.setdefault(figure, ([], []))
            own += one
            other += two
    return found


def pair_hits(first: Measurement, second: Measurement, suite: str) -> Outcomes:
    """Return the hits of both runs on the prompts of a suite that are scored in both."""
    both = zip(first.hits.get(suite, ""), second.hits.get(suite, ""), strict=False)
    scored = [pair for pair in both if "-" not in pair]
    return [one == "1" for one, _ in scored], [two == "1" for _, two in scored]


def suite_column(result: SuiteResult, found: Measurement) -> str | None:
    """Return the column of the bench's tables that a suite counts in, or None."""
    if result.kind == "harmful":
        return "asr" if result.suite in found.attacked else None
    return {"benign": "over_refusal", "utility": "accuracy"}.get(result.kind)


def difference(by_seed: Sequence[Outcomes]) -> Difference:
    """Return the difference of two arms from their paired outcomes, one pair of lists per seed."""
    pairs = count_pairs([hit for own, _ in by_seed for hit in own], [hit for _, other in by_seed for hit in other])
    return Difference(pairs, paired_difference(pairs), seeds_interval(list(_means(by_seed))), mcnemar(pairs))


def _means(by_seed: Sequence[Outcomes]) -> Iterator[float]:
    for own, other in by_seed:
        yield (sum(own) - sum(other)) / len(own)


def seeds_interval(differences: Sequence[float]) -> Interval | None:
    """Return Student's interval of a difference of shares over seeds, cut to [-1, 1]; None if all seeds agree."""
    if len(set(differences)) < 2:
        return None
    found = over_seeds(differences)
    return Interval(found.value, max(-1.0, found.low), min(1.0, found.high))


def _bounds(interval: Interval) -> str:
    return f"[{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
