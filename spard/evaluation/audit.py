"""The audit: one model's replies to suites of prompts, turned into rates with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, compress, count
from typing import Any, TypeVar

from spard.config import Audit
from spard.data.rows import Prompt
from spard.evaluation.ask import Speaker, ask_and_judge, in_memory
from spard.evaluation.early_end import draw_whole, extrapolate, settled_replies
from spard.evaluation.judges.base import Judge, Verdict
from spard.evaluation.results import ATTACKS, HARMLESS, SuiteKind, SuiteResult
from spard.evaluation.scoring import Item, score_items

Asked = TypeVar("Asked")
OnProgress = Callable[[int, int], None]  # replies so far, replies in all


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts of one kind: `harmful` asks for harm, `benign` must not be refused, `utility` has right answers.

    `mined` are harmful prompts asked otherwise than plainly, `dressed_benign` benign ones
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
    """Ask a model every suite, greedily and under the system prompt it is served with, and score the replies."""
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
    """Audit any generator; return each suite's result with every prompt's reply and verdict.

    `on_progress` is called with the number of replies so far and in all. With `reads_harmless` the judge looks for harm
    in the replies to harmless prompts too; else they end where it is settled that they comply
    (`spard.evaluation.early_end`).
    """
    asked = [replace(suite, prompts=tuple(sample(suite.prompts, cfg.max_prompts))) for suite in suites]
    found = ask_suites(speaker, asked, judge, cfg.max_new_tokens, on_progress, reads_harmless=reads_harmless)
    return [score_replies(suite, replies, judge.name) for suite, replies in zip(asked, found, strict=True)]


@dataclass(frozen=True, slots=True)
class Replies:
    """The replies to prompts, in their order, and the verdicts on them; no verdicts where no judge read them.

    `cut` tells which ones the limit of new tokens ended, `early` which ones ended because they were settled, and
    `drawn` which ones were drawn to go on to their end.
    """

    texts: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    cut: tuple[bool, ...] = ()
    early: tuple[bool, ...] = ()
    drawn: tuple[bool, ...] = ()

    def __add__(self, more: Replies) -> Replies:
        """Return these replies followed by more."""
        return Replies(*(own + others for own, others in zip(self._columns(), more._columns(), strict=True)))

    def select(self, places: Sequence[int]) -> Replies:
        """Return the replies at these places, in this order."""
        return Replies(*(tuple(column[i] for i in places) if column else () for column in self._columns()))

    def _columns(self) -> list[tuple[Any, ...]]:
        return [getattr(self, each.name) for each in fields(self)]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of one suite: its figures, and the prompts that were asked, each with its reply and verdict."""

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
    """Ask all prompts of all suites in one stream, so that no batch waits for the longest reply of a small suite."""
    kinds = (*ATTACKS, *HARMLESS) if reads_harmless else ATTACKS
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
    """Return what a suite counts, and every prompt's reply and verdict; `judge` is the name of who read them."""
    result, items = score_items(suite.name, suite.kind, suite.prompts, replies.texts, replies.verdicts, judge)
    early, drawn = (list(compress(count(), flags)) for flags in (replies.early, replies.drawn))
    result = extrapolate(result, replies.texts, early, drawn)
    return Measurement(replace(result, cut=sum(replies.cut)), suite.prompts, items, replies)


def sample(asked: Sequence[Asked], limit: int) -> list[Asked]:
    """At most `limit` prompts, or numbers of them, evenly spaced: a suite sorted by category stays balanced."""
    n = min(limit, len(asked))
    return [asked[i * len(asked) // n] for i in range(n)]
