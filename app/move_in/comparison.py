"""Measure how often a new model's replies agree with the old model's, compared with the old model's own noise floor.

For each prompt, the agreement of two models is the mean over all pairs of replies, one of each model. The noise floor
is the mean over all pairs of the old model's own replies. All intervals are over prompts, because several replies to
one prompt are not independent.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from statistics import fmean
from typing import Any

from app.move_in.judge import SameJudge
from app.move_in.ledger import Ledger, Record
from app.move_in.prompts import Prompt
from app.move_in.replies import Plan, asks, reply_text
from spard.evaluation.statistics import Interval, over_seeds, rule_of_three, wilson

# Measures of similarity between two replies, by their words.

_WORD = re.compile(r"\w+|[^\w\s]")


def is_exact(first: str, second: str) -> bool:
    """Return True if two replies are equal, ignoring white space at their ends."""
    return first.strip() == second.strip()


def similarity(first: str, second: str) -> float:
    """Return the ROUGE-L F1 score of two texts (Lin, 2004): 2 L / (m + n), from 0 to 1.

    L is the length of the longest common subsequence of their m and n words. Words are compared in lower case, and
    punctuation marks count as words. Two empty texts have the score 1.
    """
    words, others = (_WORD.findall(text.lower()) for text in (first, second))
    if not words and not others:
        return 1.0
    return 2 * _common(words, others) / (len(words) + len(others))


def _common(words: list[str], others: list[str]) -> int:
    """Return the length of the longest common subsequence, by bit-parallel dynamic programming (Hyyro, 2004).

    Bit i of `row` is 0 if the subsequence gets longer at word i.
    """
    places: dict[str, int] = {}
    for i, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << i
    full = (1 << len(words)) - 1
    row = full
    for word in others:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(words) - row.bit_count()


Measure = Callable[[str, str], float]
MEASURES: dict[str, Measure] = {"exact": is_exact, "similarity": similarity}


@dataclass(frozen=True, slots=True)
class Replies:
    """Both models' replies to a prompt, in order; `cut` is how many of the old and the new ones hit the token limit."""

    prompt_id: str
    prompt: Prompt
    old: list[str]
    new: list[str]
    cut: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of two models by one measure, each value with its 95 % interval.

    new_old     the new model's replies against the old one's
    old_old     the old model's replies against each other: the noise floor
    new_new     the new model's replies against each other
    difference  new_old minus old_old, over the prompts that have both
    unscored    prompts without new_old

    A value is None if there are too few replies, as old_old with one reply to each prompt.
    """

    prompts: int
    unscored: int
    new_old: Interval | None
    old_old: Interval | None
    new_new: Interval | None
    difference: Interval | None

    @property
    def is_below_floor(self) -> bool:
        """Return True if the interval of `difference` is below 0: agreement is significantly below the noise floor."""
        return self.difference is not None and self.difference.high < 0


@dataclass(frozen=True, slots=True)
class Scored:
    """One prompt's scores by one measure; None if there are too few replies, or the judge gave no verdict."""

    new_old: float | None
    old_old: float | None
    new_new: float | None


def score(replies: Replies, measure: Measure) -> Scored:
    """Return a prompt's scores: the means of a measure over all pairs of replies."""
    return Scored(
        _mean(measure(a, b) for a, b in product(replies.new, replies.old)),
        _mean(measure(a, b) for a, b in combinations(replies.old, 2)),
        _mean(measure(a, b) for a, b in combinations(replies.new, 2)),
    )


def judge_pairs(replies: Replies, judge: SameJudge) -> Scored:
    """Return a prompt's scores by a judge on the first new-old, old-old and new-new pair; each takes two requests."""

    def says(pair: list[str]) -> float | None:
        said = judge.says_same(replies.prompt, *pair) if len(pair) == 2 else None
        return None if said is None else float(said)

    return Scored(says([*replies.old[:1], *replies.new[:1]]), says(replies.old[:2]), says(replies.new[:2]))


def agreement(scores: Sequence[Scored]) -> Agreement:
    """Return the agreement over all prompts by one measure, with 95 % intervals."""
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
    """Return the mean of values in [0, 1] with Wilson's interval.

    The variance of such values is at most that of 0/1 values with the same mean, so the interval is wide enough.
    """
    known = [each for each in values if each is not None]
    return Interval(fmean(known), *wilson(sum(known), len(known))) if known else None


def _difference(values: Sequence[float]) -> Interval | None:
    """Return the mean of values in [-1, 1] with Student's t interval, or the rule of three's if all are equal."""
    if not values:
        return None
    found = over_seeds(values)
    low, high = found.low, found.high
    # Equal values have no variance, so Student's interval has no width, however few values there are.
    if min(values) == max(values):
        least = rule_of_three(len(values))
        low, high = min(low, found.value - least), max(high, found.value + least)
    return Interval(found.value, max(low, -1.0), min(high, 1.0))


def _mean(values: Iterable[float]) -> float | None:
    found = [*values]
    return fmean(found) if found else None


# Compare an old and a new model by their replies in the ledger.


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of two models on the same prompts.

    replies     both models' replies, by prompt in the plan's order
    scores      measure -> scores of each prompt, in the same order
    measures    measure -> agreement over all prompts
    unanswered  "golden" and "new" -> number of missing replies
    """

    old: str
    new: str
    plan: Plan
    replies: list[Replies]
    scores: dict[str, list[Scored]]
    measures: dict[str, Agreement]
    unanswered: dict[str, int]

    def changed_replies(self) -> list[tuple[Replies, Scored]]:
        """Return the prompts with changed replies, the largest loss of similarity below the noise floor first."""
        pairs = zip(self.replies, self.scores["similarity"], strict=True)
        known = [(replies, found) for replies, found in pairs if found.new_old is not None and found.new_old < 1]
        return sorted(known, key=lambda each: _loss(each[1]), reverse=True)


def compare(ledger: Ledger, old: str, new: str, judge: SameJudge | None = None) -> Compared:
    """Compare the replies that the ledger has of two models under the old model's plan."""
    plan: Plan = ledger.get("plan", old)
    kept = {kind: _texts(ledger, kind, model, plan) for kind, model in (("golden", old), ("new", new))}
    replies = [
        Replies(
            key,
            ledger.get("prompt", key),
            old=[text for text, _ in kept["golden"][key]],
            new=[text for text, _ in kept["new"][key]],
            cut=(sum(is_cut for _, is_cut in kept["golden"][key]), sum(is_cut for _, is_cut in kept["new"][key])),
        )
        for key in plan["prompts"]
    ]
    scores = {name: [score(each, measure) for each in replies] for name, measure in MEASURES.items()}
    if judge is not None:
        scores["judge"] = [judge_pairs(each, judge) for each in replies]
    wanted = len(plan["prompts"]) * plan["replies"]
    unanswered = {kind: wanted - sum(len(texts) for texts in kept[kind].values()) for kind in kept}
    measures = {name: agreement(each) for name, each in scores.items()}
    return Compared(old, new, plan, replies, scores, measures, unanswered)


def as_json(found: Compared) -> Record:
    """Return a comparison as a JSON object: plan, agreement, and each prompt with both models' replies."""
    prompts = [
        {**asdict(each), "scores": {name: asdict(scores[place]) for name, scores in found.scores.items()}}
        for place, each in enumerate(found.replies)
    ]
    facts = {"old": found.old, "new": found.new, "plan": found.plan, "unanswered": found.unanswered}
    measures = {name: {**asdict(each), "below_floor": each.is_below_floor} for name, each in found.measures.items()}
    return {**facts, "measures": measures, "prompts": prompts}


def _texts(ledger: Ledger, kind: str, model: str, plan: Plan) -> dict[str, list[tuple[str, bool]]]:
    """Return a model's replies by prompt, each with True if the token limit cut it off."""
    known = ledger.all(kind)
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for ask in asks(model, plan):
        response: Any = (known.get(ask.key()) or {}).get("response") or {}
        if (text := reply_text(response)) is not None:
            found[ask.prompt_id].append((text, response["choices"][0].get("finish_reason") == "length"))
    return found


def _loss(found: Scored) -> float:
    floor = 1.0 if found.old_old is None else found.old_old
    return floor - (found.new_old or 0.0)
