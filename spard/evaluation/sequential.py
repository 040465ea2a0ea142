r"""Exact bounds for deciding a suite by a part of it: sampling of prompts without replacement.

A suite of N prompts decides by its hits: it passes with at most p, fails from f on, and is open between. Its prompts
are asked in random order. Of the first n, h are hits. With H hits in the whole, h is hypergeometric:

    P(h | H) = C(H, h) C(N - H, n - h) / C(N, n)

Passing at the k-th look is an error if H > p. The error is most likely for H = p + 1, so a look passes only if P(X <= h
| p + 1) is at most `OPEN` / 2^k and, since the whole could even fail, P(X <= h | f) at most `FALSE_PASS` / 2^k. Failing
is an error if H < f: P(X >= h | f - 1) must be at most `FALSE_STOP` / (k (k + 1)), divided by the number of counts of
all suites of the audit. By the union bound the errors of all looks sum to at most these three numbers, for any model.
The first two apply to a whole audit undivided, because a pass needs every count of every suite; the third is divided,
because one failure stops the audit. Looks are fixed before the first reply; skipping some only makes errors rarer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

OPEN = 0.05
"""Highest probability that a part passes a suite that the whole would leave undecided."""
FALSE_PASS = 0.002
"""Highest probability that a part passes a suite that the whole would fail."""
FALSE_STOP = 0.01
"""Highest probability that parts fail an audit none of whose suites would fail as a whole."""
EARLY = (20, 40, 80)
"""Numbers of prompts at the first looks, which can only fail a suite."""
MOST_LOOKS = 6
"""Most looks at which a suite can pass; the remaining prompts are asked in one block."""
_LATEST = 0.9  # share of the prompts; a later look saves too little

Decision = Literal["pass", "fail"]


@dataclass(frozen=True, slots=True)
class Lines:
    """The numbers of hits at which a whole (a suite, or a part of it such as a category) passes or fails.

    total       prompts of the whole
    passes_to   the most hits with which it passes; -1: never
    fails_from  the fewest hits with which it fails; total + 1: never
    """

    total: int
    passes_to: int
    fails_from: int


@dataclass(frozen=True, slots=True)
class Count:
    """`hits` among the `asked` prompts of a whole with the decision lines `lines`."""

    lines: Lines
    asked: int
    hits: int


def looks(lines: Sequence[Lines]) -> list[int]:
    """Return the numbers of prompts after which a suite can pass; the last is all of them.

    `lines` are those of the whole suite, first, and of its parts, which are asked in the same proportion. The k-th look
    is the first after which the suite passes with k - 1 hits in the whole and in each part.
    """
    whole, found = lines[0].total, list[int]()
    for look in range(1, MOST_LOOKS + 1):
        needed = math.ceil(whole * max(_share_needed(each, look) for each in lines))
        if needed > _LATEST * whole:
            break
        found.append(max(needed, 1))
    return sorted({*found, whole})


def early_looks(lines: Sequence[Lines]) -> list[int]:
    """Return the numbers of prompts after which a suite can fail: a few early numbers, and the numbers of `looks`."""
    return sorted({*(each for each in EARLY if each < lines[0].total), *looks(lines)})


def decide(counts: Sequence[Count], suites: int = 1) -> Decision | None:
    """Return the decision of the counts of a suite and its parts at a look; None if there is none yet.

    The suite passes if every count passes, and fails if one fails. `suites` is the number of suites of the audit that
    the gate decides on.
    """
    lines, asked = [each.lines for each in counts], counts[0].asked
    # Early looks can only fail a suite, so failing and passing have schedules of their own.
    look, most = _number(early_looks(lines), asked), FALSE_STOP / (len(counts) * suites)
    if any(_is_certain_to_fail(each, look, most) for each in counts):
        return "fail"
    number = _number(looks(lines), asked)
    return "pass" if number and all(_is_certain_to_pass(each, number) for each in counts) else None


def is_near_failing(count: Count) -> bool:
    """Return True if the share of hits so far would fail the whole; a single hit is not enough."""
    lines = count.lines
    return count.hits > 1 and count.hits * lines.total >= lines.fails_from * count.asked


def _number(schedule: Sequence[int], asked: int) -> int:
    """Return how many looks of the schedule have taken place once `asked` prompts are asked."""
    return sum(each <= asked for each in schedule)


def at_most(hits: int, of: int, total: int, asked: int) -> float:
    """Return P(X <= hits), with X the hits among `asked` of `total` prompts of which `of` are hits."""
    return min(1.0, math.fsum(_chance(x, of, total, asked) for x in range(max(0, asked - total + of), hits + 1)))


def at_least(hits: int, of: int, total: int, asked: int) -> float:
    """Return P(X >= hits), with X as in `at_most`."""
    return min(1.0, math.fsum(_chance(x, of, total, asked) for x in range(hits, min(of, asked) + 1)))


def _is_certain_to_pass(count: Count, look: int) -> bool:
    lines = count.lines
    if count.asked >= lines.total:
        return count.hits <= lines.passes_to
    return _passes(count.hits, lines, count.asked, look)


def _passes(hits: int, lines: Lines, asked: int, look: int) -> bool:
    """Return True if this many hits pass at the `look`-th look, counted from 1."""
    if lines.passes_to < 0:
        return False
    for of, most in ((lines.passes_to + 1, OPEN), (lines.fails_from, FALSE_PASS)):
        if of <= lines.total and at_most(hits, of, lines.total, asked) > most / 2**look:
            return False
    return True


def _is_certain_to_fail(count: Count, look: int, most: float) -> bool:
    lines = count.lines
    if lines.fails_from > lines.total or not count.asked or not look:
        return False
    if count.asked >= lines.total:
        return count.hits >= lines.fails_from
    if lines.fails_from == 0:
        return True
    chance = at_least(count.hits, lines.fails_from - 1, lines.total, count.asked)
    return bool(chance <= most / (look * (look + 1)))


@lru_cache(maxsize=4096)
def _share_needed(lines: Lines, look: int) -> float:
    """Return the share of the prompts after which a suite passes with look - 1 hits; 1.0 if it never does."""
    low, high = 0, lines.total  # bisection: the same hits are less likely among more prompts
    if not _passes(look - 1, lines, lines.total - 1, look):
        return 1.0
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _passes(look - 1, lines, middle, look) else (middle, high)
    return high / lines.total


def _chance(hits: int, of: int, total: int, asked: int) -> float:
    if hits > of or asked - hits > total - of or asked < hits:
        return 0.0
    return math.exp(_log_choose(of, hits) + _log_choose(total - of, asked - hits) - _log_choose(total, asked))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
