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
from spard_lab.bench.report import Table, figures, spread, summarize, within_bounds

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


# Tables of differences: selections of the safe set by seed, methods by prompt.

REFERENCE = "spard"
METHODS_HEADING = (
    f"Each method minus {REFERENCE} on the same prompts, in points [95 % interval of the prompts, which speaks of "
    "these models], seeds [95 % interval of the mean over seeds]; p of McNemar's test after Holm"
)
SELECTIONS_HEADING = (
    "Attack success minus that of another selection, in points, paired by seed [95 % interval of the mean]; p of "
    "McNemar's test on the same prompts after Holm, which speaks of these models"
)


def paired_table(found: Sequence[Measurement]) -> Table:
    """Compare the first selection with each other one, by method, attack and pool; return head and rows."""
    arms: dict[tuple[str, str, str], dict[str, dict[int, Measurement]]] = {}
    for each in found:
        if each.selection and figures(each)["asr"] is not None:
            place = (each.method, each.attack, each.pool)
            arms.setdefault(place, {}).setdefault(each.selection, {})[each.seed] = each
    compared = [
        (place, first, other, compare(by_selection[first], by_selection[other]).get("asr"))
        for place, by_selection in arms.items()
        for first, *others in [tuple(by_selection)]
        for other in others
        if by_selection[first].keys() & by_selection[other].keys()
    ]
    p_values = iter(correct_p_values([each for *_, each in compared if each]))
    rows = []
    for place, first, other, difference in compared:
        less, seeds = _by_seed(arms[place][first], arms[place][other])
        p = f"{next(p_values):.2g}" if difference else "-"
        rows.append([*place, first, other, less, str(seeds), p])
    return ["method", "attack", "pool", "selection", "minus", "difference", "seeds", "p"], rows


def methods_table(found: Sequence[Measurement]) -> Table:
    """Compare each method with `REFERENCE` on the prompts of the seeds of both; return head and rows.

    Prompts that are unscored for one of the two are left out.
    """
    differences = _against_reference(found)
    p_values = correct_p_values(list(differences.values()))
    rows = []
    for ((figure, method, attack), each), p in zip(differences.items(), p_values, strict=True):
        kept = ("yes" if each.is_kept else "not shown") if figure == "accuracy" else ""
        rows.append([figure, attack, method, each.text(), f"{p:.2g}", str(each.pairs.n), kept])
    head = ["figure", "attack", "method", f"minus {REFERENCE}", "p", "prompts", f"at most {MARGIN:.0%} worse"]
    return head, rows


def _by_seed(first: Arm, second: Arm) -> tuple[str, int]:
    """Return the mean difference of attack success with its spread, and the number of seeds."""
    both = sorted(first.keys() & second.keys())
    less = [_asr(first[seed]) - _asr(second[seed]) for seed in both]
    summary = summarize(less)
    if len(both) > 1 and seeds_interval(less) is None:  # equal on every seed: a spread of 0 would mislead
        return f"{100 * summary.mean:.1f} on each", len(both)
    return spread("asr", within_bounds(summary, -1.0, 1.0)), len(both)


def _asr(found: Measurement) -> float:
    return figures(found)["asr"] or 0.0


def _against_reference(found: Sequence[Measurement]) -> dict[tuple[str, str, str], Difference]:
    """Return differences by figure, method and attack.

    A method without a pool is compared with the reference on the first pool.
    """
    ours = [each for each in found if each.method == REFERENCE]
    # Reversed, so that the first pool's reference overwrites the others.
    references = {(each.attack, each.seed, ""): each for each in reversed(ours)}
    references |= {(each.attack, each.seed, each.pool): each for each in ours}
    arms: dict[tuple[str, str], tuple[dict[int, Measurement], dict[int, Measurement]]] = {}
    for each in found:
        reference = references.get((each.attack, each.seed, each.pool))
        if reference is not None and each.method != REFERENCE:
            own, other = arms.setdefault((each.method, each.attack), ({}, {}))
            own[each.seed], other[each.seed] = each, reference
    return {
        (figure, method, attack): difference
        for (method, attack), both in arms.items()
        for figure, difference in compare(*both).items()
    }
