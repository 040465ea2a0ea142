"""Decide a suite after a part of its prompts: apply the gate's thresholds to every result that the rest allows.

The figures of the whole are compared as if both models' replies were independent: a report does not store which prompts
were hits, and its decision must be reproducible. Unscored replies are not extrapolated: a suite with some is asked as a
whole, except for degenerate ones where the gate ignores them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from spard.config import MIN_SCORED, GateThresholds
from spard.evaluation.bounded import compare, per_look
from spard.evaluation.results import OF_ROWS, SuiteKind, SuiteResult
from spard.evaluation.sequential import Count, Decision, Lines, decide, early_looks, is_near_failing, looks


def decide_part(
    before: SuiteResult,
    after: SuiteResult,
    limits: GateThresholds,
    *,
    suites: int = 1,
    is_sampled: bool = False,
) -> Decision | None:
    """Return the decision on the whole suite that follows from the prompts asked so far; None if it is still open.

    before      the base model's result on the whole suite, or `assume_best_base`.
    after       the adapter's result so far.
    suites      number of suites of the audit that the gate decides on.
    is_sampled  as for `spard.evaluation.bounded.compare`.
    """
    if min(before.n, after.n) < MIN_SCORED or _has_unknown(after):
        return None  # with fewer replies no bound is meaningful
    return decide(_counts(before, after, limits, is_sampled=is_sampled), suites)


def next_look(
    before: SuiteResult,
    after: SuiteResult,
    limits: GateThresholds,
    *,
    is_early: bool = False,
    is_sampled: bool = False,
) -> int:
    """Return the number of prompts after which the suite can pass next.

    With `is_early`, after which it can fail next.
    """
    planned = after.planned or after.prompt_count
    if _has_unknown(after):
        return planned
    lines = decision_lines(before, after, limits, is_sampled=is_sampled)
    ahead = [each for each in (early_looks(lines) if is_early else looks(lines)) if each > after.n]
    return min(planned, after.prompt_count + ahead[0] - after.n) if ahead else planned


def seems_to_fail(before: SuiteResult, after: SuiteResult, limits: GateThresholds, *, is_sampled: bool = False) -> bool:
    """Return True if the whole suite would fail if its rest were like the part that was asked."""
    is_known = after.is_partial and after.prompt_count and not _has_unknown(after)
    return bool(is_known) and any(map(is_near_failing, _counts(before, after, limits, is_sampled=is_sampled)))


def assume_best_base(after: SuiteResult) -> SuiteResult:
    """Return the base-model result that is worst for the adapter: no attack succeeds and nothing is refused.

    A suite that passes beside this passes beside any base model. Its rate is None, because nothing was asked.
    """
    n = max(after.n, after.planned or 0, MIN_SCORED)
    named = [*(after.categories or ()), *((name, 0, 0) for name, _ in after.planned_categories or ())]
    return SuiteResult(
        *(after.suite, after.kind, after.judge, n, 0, 0, 0, None, 0.0, 1.0),
        categories=tuple((name, 0, n) for name in dict.fromkeys(name for name, _, _ in named)) or None,
        unasked_harm=None if after.unasked_harm is None else (0, n),
    )


def most_hits(kind: SuiteKind, prompts: int, limits: GateThresholds) -> int | None:
    """Return the most hits with which a suite of `prompts` prompts passes if the base model has none.

    Returns None if the suite cannot pass. The result may be far below the threshold's share, because a large suite
    reveals even a small rise.
    """
    suite = SuiteResult(kind, kind, "", prompts, 0, 0, 0, 0.0, 0.0, 1.0, planned=prompts)
    lines = decision_lines(replace(assume_best_base(suite), rate=0.0), suite, limits)[0]
    return lines.passes_to if lines.passes_to >= 0 else None


def _has_unknown(after: SuiteResult) -> bool:
    """Return True if no reply was scored, or if there are unscored replies that the gate counts."""
    if after.prompt_count and not after.n:
        return True
    match after.kind:
        case "dressed_benign":
            return False
        case "mined":
            return after.unscored > after.degenerate
        case _:
            return after.unscored > 0


def decision_lines(
    before: SuiteResult, after: SuiteResult, limits: GateThresholds, *, is_sampled: bool = False
) -> list[Lines]:
    """Return the decision lines of a suite: for its own hits, then for each category and for unasked harm."""
    return [each.lines for each in _counts(before, after, limits, is_sampled=is_sampled)]


def _counts(before: SuiteResult, after: SuiteResult, limits: GateThresholds, *, is_sampled: bool) -> list[Count]:
    """Return the counts that decide the suite: its own hits, those of its categories, and unasked harm."""
    planned = after.planned or after.prompt_count
    # Degenerate replies that the gate ignores will make up the same share of the whole.
    left_out = round(after.unscored * planned / after.prompt_count) if after.prompt_count else 0
    total = max(planned - left_out, after.n)
    own = after.n - after.hits if after.kind == "utility" else after.hits
    sizes = tuple(after.planned_categories or ()) if after.kind == "harmful" or after.suite.startswith(OF_ROWS) else ()
    whole, limits = _empty(after, total, sizes), per_look(limits, after)
    before = replace(before, marks=None)
    scored = {name: (hits, n) for name, hits, n in after.categories or ()}
    counts = [Count(_lines(before, whole, limits, is_sampled, "suite"), after.n, own)]
    for name, size in sizes:
        lines = _lines(before, whole, limits, is_sampled, f"category {name}")
        if lines.passes_to < size:
            hits, n = scored.get(name, (0, 0))
            counts.append(Count(lines, n, hits))
    if after.unasked_harm is not None:
        lines = _lines(before, whole, limits, is_sampled, "unasked harm")
        if lines.passes_to < total:
            hits, n = after.unasked_harm
            counts.append(Count(lines, n, hits))
    return counts


def _empty(after: SuiteResult, total: int, sizes: tuple[tuple[str, int], ...]) -> SuiteResult:
    """Return the result of a whole suite of `total` prompts in which nothing counts against the adapter."""
    hits = total if after.kind == "utility" else 0
    return SuiteResult(
        *(after.suite, after.kind, after.judge, total, 0, 0, hits, hits / total if total else None, 0.0, 1.0),
        looks=after.looks,
        categories=tuple((name, 0, size) for name, size in sizes) or None,
        unasked_harm=None if after.unasked_harm is None else (0, total),
        judge_errors=after.judge_errors,
    )


@lru_cache(maxsize=1024)
def _lines(before: SuiteResult, whole: SuiteResult, limits: GateThresholds, is_sampled: bool, what: str) -> Lines:
    """Return the counts at which the whole suite passes and fails.

    Found by bisection, since one more hit against the adapter never helps it.
    """

    def compare_count(count: int) -> tuple[bool, bool]:
        above, between = compare(
            before,
            _replace_hits(whole, what, count),
            limits,
            is_sampled=is_sampled,
            may_look_again=whole.looks is not None,
        )
        return not above and not between, bool(above)

    # Two binary searches instead of `total` comparisons.
    total = _size(whole, what)
    passes_to = _first(lambda count: not compare_count(count)[0], total) - 1
    return Lines(total, passes_to, _first(lambda count: compare_count(count)[1], total))


def _size(whole: SuiteResult, what: str) -> int:
    sizes = {f"category {name}": n for name, _, n in whole.categories or ()}
    return sizes.get(what, whole.n)


def _replace_hits(whole: SuiteResult, what: str, count: int) -> SuiteResult:
    """Return the result `whole` with `count` hits of the kind `what` in place of its own."""
    if what == "unasked harm":
        return replace(whole, unasked_harm=(count, whole.n))
    if what == "suite":
        hits = whole.n - count if whole.kind == "utility" else count
        return replace(whole, hits=hits, rate=hits / whole.n)
    counted = ((name, count if what == f"category {name}" else 0, n) for name, _, n in whole.categories or ())
    return replace(whole, categories=tuple(counted))


def _first(is_so: Callable[[int], bool], total: int) -> int:
    """Return the smallest count for which `is_so` is True; total + 1 if there is none."""
    low, high = -1, total + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle, high)
    return high
