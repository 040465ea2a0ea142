"""A sequential audit: ask all suites in rounds, each only until its decision is almost certain.

The first round asks a few plain attacks, the second a few prompts of every suite; further rounds continue with the
suites that are not settled. The order of a suite's prompts is drawn with a secret, its categories in turn. The audit
ends at the first certain failure. The base model is asked a suite only if that can change the decision.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spard.config import GateThresholds
from spard.data.rows import Prompt
from spard.evaluation.audit import Measurement, Replies, Suite, score_replies
from spard.evaluation.gate import gate, is_gated, is_unasked, passes
from spard.evaluation.results import PLAIN, SuiteResult
from spard.evaluation.sequential import EARLY, assume_best_base, decide_part, next_look, seems_to_fail

UNGATED = 150
"""Number of prompts asked of a suite on which the gate does not decide."""

Ask = Callable[[Sequence[Suite]], Sequence[Replies]]
AskBase = Callable[[Collection[str]], Sequence[SuiteResult]]
"""Takes names of suites, and returns the base model's results on the whole suites."""

Settled = Literal["pass", "fail", "open"]
"""What the prompts asked so far decide; `open`: the suite was asked completely, or it does not decide."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a sequential audit.

    limits        thresholds of the gate.
    secret        seed of the order of the prompts.
    judge         name of the judge that reads the replies.
    suites        number of suites that the gate decides on.
    looked_twice  names of suites that may get a second look.
    sampled       names of suites that are a sample of a larger one (see `spard.evaluation.gate.gate`).
    """

    limits: GateThresholds
    secret: str
    judge: str
    suites: int
    looked_twice: Collection[str] = ()
    sampled: Collection[str] = ()


def audit_in_rounds(
    ask: Ask, suites: Sequence[Suite], base: Mapping[str, SuiteResult], ask_base: AskBase, rules: Rules
) -> list[Measurement]:
    """Ask suites until the gate's decision is almost certain, and return the measurement of each.

    ask       asks the adapter prompts and returns the replies by suite.
    base      the base model's results by suite; some suites may not have been asked.
    ask_base  asks the base model such suites as a whole.
    """
    found = [_Suite(suite, rules, in_random_order(suite.prompts, f"{rules.secret}\n{suite.name}")) for suite in suites]
    known = dict(base)
    while asked := _next_round(found, known):
        ends = [each.next(known) for each in asked]
        blocks = ask([each.block(end) for each, end in zip(asked, ends, strict=True)])
        for each, end, replies in zip(asked, ends, blocks, strict=True):
            each.add(end, replies)
            each.settle(known)
        # While a failure is near, the base model's replies would be wasted.
        if not any(each.settled == "fail" or each.seems_to_fail(known) for each in found):
            _ask_base(found, known, ask_base)
        if any(each.settled == "fail" for each in found):
            break
    return [each.measured for each in found]


def _next_round(found: Sequence[_Suite], known: Mapping[str, SuiteResult]) -> list[_Suite]:
    """Return the suites to ask next: those that seem to fail, else new plain ones, else new ones, else all open ones.

    One failure ends the audit, so nothing else is asked while one is near. Suites that the gate ignores come last.
    """
    failing = [each for each in found if each.seems_to_fail(known)]
    unsettled = [each for each in found if each.settled is None]
    gated = [each for each in unsettled if each.is_gated]
    new = [each for each in gated if not each.asked]
    plain = [each for each in new if each.suite.kind in PLAIN]
    return failing or plain or new or gated or unsettled


def _ask_base(found: Sequence[_Suite], known: dict[str, SuiteResult], ask_base: AskBase) -> None:
    """Ask the base model the suites whose decision depends on it, and add its results to `known`."""
    if needed := [each for each in found if each.needs_base(known)]:
        known |= {each.suite: each for each in ask_base([each.suite.name for each in needed])}
        for each in needed:
            each.settle(known)


@dataclass(slots=True)
class _Suite:
    """The state of one suite during the audit: its replies so far, and the decision that follows from them."""

    suite: Suite
    rules: Rules
    order: Sequence[int]
    replies: Replies = field(default_factory=Replies)
    asked: int = 0
    settled: Settled | None = None
    measured: Measurement = field(init=False)

    def __post_init__(self) -> None:
        self._measure()

    @property
    def is_gated(self) -> bool:
        """True if the gate decides on the suite."""
        return is_gated(self.suite.kind, self.rules.limits)

    @property
    def is_sampled(self) -> bool:
        """True if the suite is a sample of a larger one."""
        return self.suite.name in self.rules.sampled

    def block(self, n: int) -> Suite:
        """Return the prompts to ask so that `n` are asked in all."""
        return replace(self.suite, prompts=tuple(self.suite.prompts[i] for i in self.order[self.asked : n]))

    def add(self, n: int, replies: Replies) -> None:
        """Store the replies to a block, and measure all replies so far."""
        self.replies, self.asked = self.replies + replies, n
        self._measure()

    def next(self, known: Mapping[str, SuiteResult]) -> int:
        """Return the number of prompts that should be asked by the end of the next round."""
        whole, limits = len(self.order), self.rules.limits
        if not self.is_gated:
            return min(UNGATED, whole)
        if not self.asked:
            return min(EARLY[0], whole)
        before, is_early = self._base(known), self.seems_to_fail(known)
        return next_look(before, self.measured.result, limits, is_early=is_early, is_sampled=self.is_sampled)

    def seems_to_fail(self, known: Mapping[str, SuiteResult]) -> bool:
        """Return True if the undecided suite fails at its present share of hits.

        False if the base model was not asked.
        """
        before, after = known[self.suite.name], self.measured.result
        is_open = self.settled is None and self.is_gated and not is_unasked(before)
        return is_open and seems_to_fail(before, after, self.rules.limits, is_sampled=self.is_sampled)

    def needs_base(self, known: Mapping[str, SuiteResult]) -> bool:
        """Return True if the base model was not asked yet and its result could change the decision."""
        after, limits = self.measured.result, self.rules.limits
        return is_unasked(known[self.suite.name]) and needs_base(after, limits, is_sampled=self.is_sampled)

    def settle(self, known: Mapping[str, SuiteResult]) -> None:
        """Update `settled`; it stays None while an unasked base model could change the decision."""
        after, limits = self.measured.result, self.rules.limits
        if not self.is_gated:
            self.settled = "open" if self.asked >= min(UNGATED, len(self.order)) else None
        elif self.needs_base(known):
            self.settled = None
        elif after.is_partial:
            before, suites = self._base(known), self.rules.suites
            self.settled = decide_part(before, after, limits, suites=suites, is_sampled=self.is_sampled)
        else:
            is_stopped = gate([self._base(known)], [after], limits, sampled=self.rules.sampled).decision == "fail"
            self.settled = "fail" if is_stopped else "open"

    def _base(self, known: Mapping[str, SuiteResult]) -> SuiteResult:
        found = known[self.suite.name]
        return assume_best_base(self.measured.result) if is_unasked(found) else found

    def _measure(self) -> None:
        """Score the replies so far, in the suite's own order of prompts."""
        by_place = sorted(range(self.asked), key=lambda at: self.order[at])
        places = [self.order[at] for at in by_place]
        asked = replace(self.suite, prompts=tuple(self.suite.prompts[i] for i in places))
        found = score_replies(asked, self.replies.select(by_place), self.rules.judge)
        marks = dict(zip(places, found.result.marks, strict=True)) if found.result.marks is not None else None
        sizes = Counter(each.category for each in self.suite.prompts if each.category is not None)
        result = replace(
            found.result,
            marks=None if marks is None else "".join(marks.get(i, "-") for i in range(len(self.order))),
            planned=len(self.order),
            planned_categories=tuple(sizes.items()) or None,
            looks=2 if self.suite.name in self.rules.looked_twice else None,
        )
        self.measured = replace(found, result=result)


def needs_base(after: SuiteResult, limits: GateThresholds, *, is_sampled: bool = False) -> bool:
    """Return True if a suite fails against the strictest possible base model, so that the real one's result matters."""
    if not after.prompt_count or not is_gated(after.kind, limits):
        return False
    best = assume_best_base(after)
    if after.is_partial:
        return decide_part(best, after, limits, is_sampled=is_sampled) == "fail"
    return not passes(best, after, limits, is_sampled=is_sampled)


def in_random_order(prompts: Sequence[Prompt], secret: str) -> list[int]:
    """Return the indices of prompts in an order drawn with a secret; every prefix has its share of each category."""
    rng, by_category = random.Random(secret), dict[str | None, list[int]]()
    for i, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(i)
    found = []
    for places in by_category.values():
        rng.shuffle(places)
        # Keys spread each category evenly over (0, 1), with a random offset per prompt.
        found += [((at + rng.random()) / len(places), place) for at, place in enumerate(places)]
    return [place for _, place in sorted(found)]
