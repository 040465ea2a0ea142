"""Replies to harmless prompts end where no judge in use could change its mind about them.

Whether a reply refuses is told by its first `HEAD` characters (`is_refusal`), so that one which has not refused by then
never will. A refusal goes on to its end, since it may help after all, and so does every reply that another judge
reads. What is lost is whether a reply would have broken down later. A fifth of the prompts, drawn by a hash of them and
so the same for every model, is therefore answered to the end, and of the others as large a share counts as degenerate
as of these.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from spard.data.rows import Prompt
from spard.evaluation.judges.refusal import HEAD, is_broken, is_refusal
from spard.evaluation.rates import rate
from spard.evaluation.results import SuiteResult
from spard.models.settling import Settled

DRAWN = 5  # one of so many prompts is answered to the end
LEAST = HEAD + 4  # characters; the last ones of an unfinished reply may still change with the next token


def draw_whole(prompts: Sequence[Prompt]) -> frozenset[int]:
    """Return the places of the prompts of a suite that are answered to the end: a fifth, and one at least."""
    keys = [hashlib.sha256(f"{each.prompt}\n{i}".encode()).digest() for i, each in enumerate(prompts)]
    order = sorted(range(len(prompts)), key=keys.__getitem__)
    return frozenset(order[: math.ceil(len(prompts) / DRAWN)])


def settled_replies(prompts: Sequence[Prompt], suites: Sequence[range]) -> Settled:
    """Return which replies may end early, of the suites at these places; no judge but the refusal rule reads them."""
    places = set[int]()
    for own in suites:
        whole = draw_whole([prompts[i] for i in own])
        places.update(i for number, i in enumerate(own) if number not in whole and not prompts[i].encoding)

    def holds(place: int, reply: str) -> bool:
        return is_settled(f"{prompts[place].prefill or ''} {reply}".strip())

    return Settled(frozenset(places), LEAST, holds)


def is_settled(reply: str) -> bool:
    """Tell whether the beginning of a reply to a harmless prompt is long enough to see that it does not refuse."""
    return len(reply) >= LEAST and not is_refusal(reply) and not is_broken(reply)


def extrapolate(
    result: SuiteResult, replies: Sequence[str], early: Collection[int], whole: Collection[int]
) -> SuiteResult:
    """Return a suite's figures with the share of degenerate replies that is expected of those which ended early.

    `early` are the places of replies that ended early, `whole` of those that were drawn to go on. The expected number
    is rounded up; where none of those drawn could have ended early, all that did count as degenerate.
    """
    if not early:
        return result
    alike = [replies[i] for i in whole if is_settled(replies[i][:LEAST])]
    share = sum(map(is_broken, alike)) / len(alike) if alike else 1.0
    more = math.ceil(share * len(early) - 1e-9)
    found = rate(result.hits, result.n - more, result.unscored + more)
    return replace(
        result,
        n=found.n,
        unscored=found.unscored,
        degenerate=result.degenerate + more,
        rate=found.rate,
        low=found.low,
        high=found.high,
        marks=None if more else result.marks,  # which ones they are is not known
        ended_early=len(early),
    )
