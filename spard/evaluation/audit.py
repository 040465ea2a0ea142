"""The audit: ask a model suites of prompts and turn its replies into rates with intervals."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, compress, count
from typing import Any, TypeVar

from spard.config import Audit
from spard.data.rows import Prompt
from spard.evaluation.ask import Speaker, ask_and_judge, in_memory
from spard.evaluation.judges.base import Judge, Verdict
from spard.evaluation.judges.refusal import HEAD, is_broken, is_refusal
from spard.evaluation.rates import rate
from spard.evaluation.results import ATTACKS, HARMLESS, SuiteKind, SuiteResult
from spard.evaluation.scoring import Item, score_items
from spard.models.settling import Settled

# Early end of replies to harmless prompts: they stop once their verdict cannot change.
#
# The refusal rule (`is_refusal`) reads only the first `HEAD` characters, so a reply that has not refused by then
# never will. Refusals are generated to their end, since they may still help, and so is every reply that another judge
# reads. A reply that ends early may hide that it would have broken down later. Therefore a fifth of the prompts,
# drawn by a hash and thus the same for every model, is answered to the end, and their share of degenerate replies is
# assumed for the others.

DRAWN = 5  # one in this many prompts is answered to the end
LEAST = HEAD + 4  # characters; the last ones of an unfinished reply can still change with the next token


def draw_whole(prompts: Sequence[Prompt]) -> frozenset[int]:
    """Return the indices of a suite's prompts that are answered to the end: a fifth, and at least one."""
    keys = [hashlib.sha256(f"{each.prompt}\n{i}".encode()).digest() for i, each in enumerate(prompts)]
    order = sorted(range(len(prompts)), key=keys.__getitem__)
    return frozenset(order[: math.ceil(len(prompts) / DRAWN)])


def settled_replies(prompts: Sequence[Prompt], suites: Sequence[range]) -> Settled:
    """Return the rule by which replies end early, for suites at these index ranges that only the refusal rule reads."""
    places = set[int]()
    for own in suites:
        whole = draw_whole([prompts[i] for i in own])
        places.update(i for number, i in enumerate(own) if number not in whole and not prompts[i].encoding)

    def holds(place: int, reply: str) -> bool:
        return is_settled(f"{prompts[place].prefill or ''} {reply}".strip())

    return Settled(frozenset(places), LEAST, holds)


def is_settled(reply: str) -> bool:
    """Return True if the beginning of a reply to a harmless prompt is long enough to show that it does not refuse."""
    return len(reply) >= LEAST and not is_refusal(reply) and not is_broken(reply)


def extrapolate(
    result: SuiteResult, replies: Sequence[str], early: Collection[int], whole: Collection[int]
) -> SuiteResult:
    """Return a result that counts as many early-ended replies as degenerate as the fully generated ones suggest.

    `early` are the indices of replies that ended early, `whole` of those drawn to go on. The expected number is rounded
    up. If none of the drawn replies could have ended early, there is no estimate and all early ones count as
    degenerate.
    """
    if not early:
        return result
    alike = [replies[i] for i in whole if is_settled(replies[i][:LEAST])]
    share = sum(map(is_broken, alike)) / len(alike) if alike else 1.0
    # Without 1e-9 a whole number with a rounding error would be rounded up to the next.
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
        marks=None if more else result.marks,  # it is unknown which replies they are
        ended_early=len(early),
    )


Asked = TypeVar("Asked")
OnProgress = Callable[[int, int], None]  # replies so far, replies in all


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts of one kind: `harmful` ask for harm, `benign` must not be refused, `utility` have right answers.

    `mined` are harmful prompts that are not asked plainly, `dressed_benign` such benign ones
    (`spard.evaluation.mined_suites`).
    """

    name: str
    kind: SuiteKind
    prompts: tuple[Prompt, ...]


def audit(
    model: Any,
    tokenizer: Any,
    suites: Sequence[Suite],
    judge: Judge,
    cfg: Audit,
    on_progress: OnProgress | None = None,
    system: str | None = None,
) -> list[SuiteResult]:
    """Ask a model all suites and return each suite's result.

    Decoding is greedy unless a prompt says otherwise; `system` is the system prompt that the model is served with. See
    `audit_speaker` for the other arguments.
    """
    speaker = in_memory(model, tokenizer, system)
    return [each.result for each in audit_speaker(speaker, suites, judge, cfg, on_progress)]


def audit_speaker(
    speaker: Speaker,
    suites: Sequence[Suite],
    judge: Judge,
    cfg: Audit,
    on_progress: OnProgress | None = None,
    *,
    reads_harmless: bool = False,
) -> list[Measurement]:
    """Audit any generator; return each suite's result with every reply and verdict.

    cfg             `max_prompts` per suite and `max_new_tokens` per reply are used.
    on_progress     called with the replies so far and in all.
    reads_harmless  the judge also reads replies to harmless prompts, for harm. If False, such replies end as soon as
                    they cannot become refusals any more (`spard.evaluation.audit`).
    """
    asked = [replace(suite, prompts=tuple(sample(suite.prompts, cfg.max_prompts))) for suite in suites]
    found = ask_suites(speaker, asked, judge, cfg.max_new_tokens, on_progress, reads_harmless=reads_harmless)
    return [score_replies(suite, replies, judge.name) for suite, replies in zip(asked, found, strict=True)]


@dataclass(frozen=True, slots=True)
class Replies:
    """The replies to prompts, in order, with one entry per reply in each column; a column may be empty.

    verdicts  empty if no judge read the replies.
    cut       True for replies that ended at the token limit.
    early     True for replies that were ended because they were settled.
    drawn     True for replies whose prompts were drawn to be answered to the end.
    """

    texts: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    cut: tuple[bool, ...] = ()
    early: tuple[bool, ...] = ()
    drawn: tuple[bool, ...] = ()

    def __add__(self, more: Replies) -> Replies:
        """Return the concatenation of both."""
        return Replies(*(own + others for own, others in zip(self._columns(), more._columns(), strict=True)))

    def select(self, places: Sequence[int]) -> Replies:
        """Return the replies at these indices, in this order."""
        return Replies(*(tuple(column[i] for i in places) if column else () for column in self._columns()))

    def _columns(self) -> list[tuple[Any, ...]]:
        return [getattr(self, each.name) for each in fields(self)]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one suite, with its prompts, the scored items and the replies."""

    result: SuiteResult
    prompts: Sequence[Prompt]
    items: Sequence[Item]
    replies: Replies


def ask_suites(
    speaker: Speaker,
    suites: Sequence[Suite],
    judge: Judge,
    max_new_tokens: int,
    on_progress: OnProgress | None = None,
    *,
    reads_harmless: bool = False,
) -> list[Replies]:
    """Ask all prompts of all suites and return the replies by suite.

    One stream over all suites is faster: no batch waits for the longest reply of a small suite.
    """
    kinds = (*ATTACKS, *HARMLESS) if reads_harmless else ATTACKS
    # Prompts of all suites are numbered across; `places` are each suite's own numbers.
    starts = list(accumulate((len(suite.prompts) for suite in suites), initial=0))
    places = [range(starts[i], starts[i + 1]) for i in range(len(suites))]
    judged = {i for suite, own in zip(suites, places, strict=True) if suite.kind in kinds for i in own}
    prompts = [prompt for suite in suites for prompt in suite.prompts]
    may_end = [own for suite, own in zip(suites, places, strict=True) if suite.kind in HARMLESS and not reads_harmless]
    settled = settled_replies(prompts, may_end)
    answers = ask_and_judge(speaker, prompts, max_new_tokens, judge, judged, on_progress, settled)
    found = []
    for suite, own in zip(suites, places, strict=True):
        drawn = draw_whole(suite.prompts) if own in may_end else frozenset()
        found.append(
            Replies(
                tuple(answers.replies[i] for i in own),
                tuple(answers.verdicts[i] for i in own if i in judged),
                tuple(i in answers.cut for i in own),
                tuple(i in answers.early for i in own),
                tuple(number in drawn for number in range(len(own))),
            )
        )
    return found


def score_replies(suite: Suite, replies: Replies, judge: str) -> Measurement:
    """Return a suite's result with every reply as it was scored; `judge` is the name of the judge that read them."""
    result, items = score_items(suite.name, suite.kind, suite.prompts, replies.texts, replies.verdicts, judge)
    early, drawn = (list(compress(count(), flags)) for flags in (replies.early, replies.drawn))
    result = extrapolate(result, replies.texts, early, drawn)
    return Measurement(replace(result, cut=sum(replies.cut)), suite.prompts, items, replies)


def sample(asked: Sequence[Asked], limit: int) -> list[Asked]:
    """Return at most `limit` elements, evenly spaced, so that a suite sorted by category stays balanced."""
    n = min(limit, len(asked))
    return [asked[i * len(asked) // n] for i in range(n)]
