"""How often a new model says what the old one said, beside how often the old one says it again itself.

For each prompt the agreement of two sets of replies is the mean over all pairs of a reply of one and a reply of the
other; the old model's own is the mean over pairs of different replies of its own: the noise floor. Prompts are the
units of all intervals: replies to one prompt are no independent evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean

from app.move_in.judge import SameJudge
from app.move_in.prompts import Prompt
from app.move_in.similarity import is_exact, similarity
from spard.evaluation.rates import wilson
from spard.evaluation.statistics import Interval, over_seeds, rule_of_three

Measure = Callable[[str, str], float]
MEASURES: dict[str, Measure] = {"exact": is_exact, "similarity": similarity}


@dataclass(frozen=True, slots=True)
class Replies:
    """What both models said to a prompt, in the order of asking; `cut` counts replies that a limit of tokens ended."""

    prompt_id: str
    prompt: Prompt
    old: list[str]
    new: list[str]
    cut: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """One measure: new against old, the old model against itself, the new one against itself, and the difference.

    `difference` is new against old minus old against itself, over the prompts that have both. What cannot be known is
    None: with one reply to each prompt there is no noise floor.
    """

    prompts: int
    unscored: int
    new_old: Interval | None
    old_old: Interval | None
    new_new: Interval | None
    difference: Interval | None

    @property
    def is_below_floor(self) -> bool:
        """Whether the new model agrees with the old one less than that one with itself, beyond chance."""
        return self.difference is not None and self.difference.high < 0


@dataclass(frozen=True, slots=True)
class Scored:
    """One prompt and one measure; None where there are too few replies, or the judge gave no verdict."""

    new_old: float | None
    old_old: float | None
    new_new: float | None


def score(replies: Replies, measure: Measure) -> Scored:
    """Return the mean agreement of all pairs."""
    return Scored(
        _mean(measure(a, b) for a, b in product(replies.new, replies.old)),
        _mean(measure(a, b) for a, b in combinations(replies.old, 2)),
        _mean(measure(a, b) for a, b in combinations(replies.new, 2)),
    )


def judge_pairs(replies: Replies, judge: SameJudge) -> Scored:
    """Return what a judge says of the first pair of each kind: it costs two requests a pair."""

    def says(pair: list[str]) -> float | None:
        said = judge.says_same(replies.prompt, *pair) if len(pair) == 2 else None
        return None if said is None else float(said)

    return Scored(says([*replies.old[:1], *replies.new[:1]]), says(replies.old[:2]), says(replies.new[:2]))


def agreement(scores: Sequence[Scored]) -> Agreement:
    """Return one measure over all prompts, with 95 % intervals."""
    differences = [
        each.new_old - each.old_old for each in scores if each.new_old is not None and each.old_old is not None
    ]
    return Agreement(
        prompts=len(scores),
        unscored=sum(each.new_old is None for each in scores),
        new_old=_share([each.new_old for each in scores]),
        old_old=_share([each.old_old for each in scores]),
        new_new=_share([each.new_new for each in scores]),
        difference=_difference(differences),
    )


def _share(values: Sequence[float | None]) -> Interval | None:
    """Return a mean of values from 0 to 1 with Wilson's interval.

    A value from 0 to 1 varies no more than a yes or no of the same mean, so that the interval is wide enough.
    """
    known = [each for each in values if each is not None]
    return Interval(fmean(known), *wilson(sum(known), len(known))) if known else None


def _difference(values: Sequence[float]) -> Interval | None:
    """Return a mean of values from -1 to 1 with Student's interval; the rule of three's where all values are equal."""
    if not values:
        return None
    found = over_seeds(values)
    low, high = found.low, found.high
    if min(values) == max(values):
        least = rule_of_three(len(values))
        low, high = min(low, found.value - least), max(high, found.value + least)
    return Interval(found.value, max(low, -1.0), min(high, 1.0))


def _mean(values: Iterable[float]) -> float | None:
    found = [*values]
    return fmean(found) if found else None
