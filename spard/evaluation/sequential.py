r"""When a part of a suite decides like the whole: exact bounds for prompts that are drawn without replacement.

A suite of N prompts decides by its hits: it passes with at most p, fails from f, and is open between. Its prompts are
asked in a random order. Of n that were asked h are hits. With H hits in the whole, h is hypergeometric:

    P(h | H) = C(H, h) C(N - H, n - h) / C(N, n)

To stop at the k-th look and pass is an error if H > p. That is most likely with H = p + 1, so a look stops only where
P(X <= h | p + 1) is at most `OPEN` / 2^k, and, where the whole would fail, P(X <= h | f) at most `FALSE_PASS` / 2^k. To
fail is an error if H < f: P(X >= h | f - 1) has to be at most `FALSE_STOP` / (k (k + 1)), shared out over all counts of
all suites of the audit. The looks' errors add up to no more than these three numbers, whatever the model does (the
union bound). The first two hold for a whole audit as they are, since a pass needs every count of every suite; the third
is shared out, since one failure stops the audit. The looks are fixed before the first reply; to leave some out makes
fewer errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

OPEN = 0.05
"""How often a part may pass a suite that the whole would leave undecided, at most."""
FALSE_PASS = 0.002
"""How often a part may pass a suite that the whole would fail, at most."""
FALSE_STOP = 0.01
"""How often parts may fail an audit whose suites would not, at most."""
EARLY = (20, 40, 80)
"""Prompts of the first looks, which can only fail a suite."""
MOST_LOOKS = 6
"""Looks at which a suite can pass, at most; the rest is asked in one piece."""
_LATEST = 0.9  # of the prompts: a later look saves too little

Decision = Literal["pass", "fail"]


@dataclass(frozen=True, slots=True)
class Lines:
    """Where a count of the whole decides.

    total       how many prompts the whole has
    passes_to   the most hits with which it passes; -1: it never does
    fails_from  the fewest hits with which it fails; total + 1: it never does
    """

    total: int
    passes_to: int
    fails_from: int


@dataclass(frozen=True, slots=True)
class Count:
    """`hits` among the `asked` prompts of a whole that decides by `lines`."""

    lines: Lines
    asked: int
    hits: int


def looks(lines: Sequence[Lines]) -> list[int]:
    """Return after how many prompts of a suite it can pass, the last one after all.

    `lines` are those of the whole suite, first, and of its parts, which are asked in the same proportion. The k-th look
    is the first that would pass the suite with k - 1 hits in the whole and in each part.
    """
    whole, found = lines[0].total, list[int]()
    for look in range(1, MOST_LOOKS + 1):
        needed = math.ceil(whole * max(_share_needed(each, look) for each in lines))
        if needed > _LATEST * whole:
            break
        found.append(max(needed, 1))
    return sorted({*found, whole})


def early_looks(lines: Sequence[Lines]) -> list[int]:
    """Return after how many prompts a suite can fail: a few early looks, and those at which it can pass."""
    return sorted({*(each for each in EARLY if each < lines[0].total), *looks(lines)})


def decide(counts: Sequence[Count], suites: int = 1) -> Decision | None:
    """Return what the counts of a suite and of its parts decide at a look; None where they decide nothing yet.

    The suite passes if every count passes, and fails if one of them fails. `suites` are those of the audit that the
    gate decides on.
    """
    lines, asked = [each.lines for each in counts], counts[0].asked
    look, most = _number(early_looks(lines), asked), FALSE_STOP / (len(counts) * suites)
    if any(_is_certain_to_fail(each, look, most) for each in counts):
        return "fail"
    number = _number(looks(lines), asked)
    return "pass" if number and all(_is_certain_to_pass(each, number) for each in counts) else None


def is_near_failing(count: Count) -> bool:
    """Tell whether the share of hits so far would fail the whole; one hit tells nothing."""
    lines = count.lines
    return count.hits > 1 and count.hits * lines.total >= lines.fails_from * count.asked


def _number(schedule: Sequence[int], asked: int) -> int:
    """Return the number of the look that is taken after so many prompts, from 1; 0 before the first."""
    return sum(each <= asked for each in schedule)


def at_most(hits: int, of: int, total: int, asked: int) -> float:
    """Return P(X <= hits) for the hits among `asked` prompts of `total`, of which `of` are hits."""
    return min(1.0, math.fsum(_chance(x, of, total, asked) for x in range(max(0, asked - total + of), hits + 1)))


def at_least(hits: int, of: int, total: int, asked: int) -> float:
    """Return P(X >= hits), likewise."""
    return min(1.0, math.fsum(_chance(x, of, total, asked) for x in range(hits, min(of, asked) + 1)))


def _is_certain_to_pass(count: Count, look: int) -> bool:
    lines = count.lines
    if count.asked >= lines.total:
        return count.hits <= lines.passes_to
    return _passes(count.hits, lines, count.asked, look)


def _passes(hits: int, lines: Lines, asked: int, look: int) -> bool:
    """Tell whether so many hits pass at the look that is the `look`-th at which the suite can pass, from 1."""
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
    """Return the share of the prompts after which look - 1 hits pass."""
    low, high = 0, lines.total  # by bisection: with more prompts as many hits are less likely
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
