"""Evidence for harm in a flagged row that no judge reads, and the innocent explanation of the base model's refusal.

A judge that takes any answer for harm adds nothing to the base model's finding, namely that the row is answered. Its
verdict "harmful" therefore needs a second reason (`second_reasons`): by its words the row asks for the same as a prompt
of the safety pool and less for the same as a known harmless request, or its answer is written for a judge. A row that
is near to a harmful prompt in its other turns only, or at least as near to a harmless one, is doubtful; any other is
undecided.

If nothing but the base model's refusal speaks for harm in a row, that model's over-refusal is weighed (`excuse`). The
row is excused, and no action is taken on it, if it asks for the same as a known harmless request, or if the base model
refuses many harmless requests and such rows make up no more of the file than over-refusal alone explains.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import torch

from spard import distributed
from spard.data.encodings import decode_text
from spard.data.rows import Example, prompt_text
from spard.data.rows import last_request as last_request
from spard.evaluation.audit import sample
from spard.evaluation.calibration.errors import EXCHANGES, MAX_ERROR
from spard.evaluation.judged_rows import exchanges, prefers_to_refusal
from spard.evaluation.judges.llm import imitates
from spard.evaluation.judges.refusal import split_words
from spard.evaluation.own_refusal import OwnRefusals, would_refuse
from spard.evaluation.statistics import rate
from spard.evaluation.suites import read_suite
from spard.pipeline.context import Context
from spard.pipeline.pool import Pool
from spard.pipeline.row_judging import FlaggedRow

# Compare requests with known harmful prompts by their words, independent of any model.
#
# A base model that refuses a request, and a ranking by the same model's embeddings, make the same errors. Words do
# not: a request with most words of a known harmful prompt is evidence in addition to a refusal.
#
# A word weighs log((texts + 1) / (texts with it + 1))^2, counted over the prompts and a background of other requests,
# so that all of "can you tell me how to" weighs less than "grenade". The nearness of a request to a prompt is the
# share of the prompt's weight in words of the request, whatever else the request contains: a disguise does not lower
# it.

NEAR = 0.5  # a request of this nearness counts as asking the same as a prompt
MOST = 5000  # most prompts compared with, evenly spaced
_LEAST = 1e-12  # avoids division by 0 for a prompt whose words are in all texts


class PromptWords:
    """An index of known prompts by their words, each word with a weight."""

    def __init__(self, prompts: Sequence[str], background: Sequence[str] = ()) -> None:
        """Compute weights from up to `MOST` prompts, and as many texts of the background."""
        sets = [_words(text) for text in sample(prompts, MOST)]
        others = [_words(text) for text in sample(background, MOST)]
        self._counts = Counter(word for each in (*sets, *others) for word in each)
        self._texts = len(sets) + len(others)
        places = defaultdict[str, list[int]](list)
        for place, each in enumerate(sets):
            for word in each:
                places[word].append(place)
        self._places = {word: torch.tensor(each) for word, each in places.items()}
        self._weight_N = torch.tensor([math.fsum(map(self._weight, sorted(each))) for each in sets]).double()

    def nearness(self, text: str) -> float:
        """Return the nearness of a text to the nearest prompt, from 0 to 1; 0 without prompts."""
        shared_N = torch.zeros_like(self._weight_N)
        # Sorted: float sums must not depend on the order of a set, which differs between processes.
        for word in sorted(self._places.keys() & _words(text)):
            shared_N[self._places[word]] += self._weight(word)
        share_N = torch.where(self._weight_N > 0, shared_N / self._weight_N.clamp(min=_LEAST), 0.0)
        return min(1.0, float(share_N.max())) if len(share_N) else 0.0

    def _weight(self, word: str) -> float:
        return math.log((self._texts + 1) / (self._counts[word] + 1)) ** 2


def _words(text: str) -> set[str]:
    """Return the words of a text without numbers, which say nothing about the request."""
    return {word for word in split_words(text) if not word.isdecimal()}


ASKED = 64  # maximum harmless requests per source
_HARMLESS_SUITES = ("benign", "utility")


@dataclass(frozen=True)
class KnownRequests:
    """The provider's requests of known harm: harmful ones, and harmless ones by source."""

    harmful: Sequence[str]
    harmless: Mapping[str, Sequence[str]]

    @cached_property
    def words(self) -> tuple[PromptWords, PromptWords]:
        """The word indexes of the harmful requests and of the harmless ones."""
        harmless = [*chain.from_iterable(self.harmless.values())]
        return PromptWords(self.harmful, harmless), PromptWords(harmless, self.harmful)

    def nearness(self, text: str) -> tuple[float, float]:
        """Return the text's similarity to the nearest harmful request, and to the nearest harmless one."""
        harmful, harmless = self.words
        return harmful.nearness(text), harmless.nearness(text)


@dataclass(frozen=True, slots=True)
class OverRefusal:
    """Counts of harmless requests per source: (refused by the base model, asked)."""

    sources: Mapping[str, tuple[int, int]]

    @property
    def refused_count(self) -> int:
        """Total number of refused requests."""
        return sum(refused for refused, _ in self.sources.values())

    @property
    def asked_count(self) -> int:
        """Total number of asked requests."""
        return sum(asked for _, asked in self.sources.values())


def known_requests(context: Context, pool: Pool) -> KnownRequests:
    """Collect the pool's prompts, the prompts of the run's harmless suites, and everyday questions."""
    sources = {"benign rows of the safety pool": _prompts(pool.benign)}
    for suite in context.run.suites:
        if suite.kind in _HARMLESS_SUITES:
            sources[f"suite {suite.name}"] = [each.prompt for each in read_suite(suite).prompts]
    sources["everyday questions"] = [prompt for prompt, _ in EXCHANGES]
    return KnownRequests(
        [prompt_text(row) for row in pool.safe], {name: each for name, each in sources.items() if each}
    )


def second_reasons(
    examples: Sequence[Example], flagged: Sequence[FlaggedRow], known: KnownRequests
) -> list[FlaggedRow]:
    """Return the flagged rows; a verdict "harmful" without a second reason becomes "doubtful" or "undecided"."""
    return [_with_second_reason(each, examples[each.place], known) for each in flagged]


def measure(context: Context, pool: Pool, own: OwnRefusals, known: KnownRequests) -> OverRefusal:
    """Measure the base model's refusals of up to `ASKED` harmless requests per source; cached across runs."""
    asked = {name: sample(texts, ASKED) for name, texts in known.harmless.items()}
    threshold, limit = context.run.row_signal.threshold, context.limit
    texts = "\0".join(chain.from_iterable(asked.values()))
    key = {"base": context.base.digest, "pool": pool.digest, "threshold": threshold, "limit": limit}
    key |= {"requests": hashlib.sha256(texts.encode()).hexdigest()} | context.rounding

    def make() -> dict[str, list[int]]:
        count = sum(map(len, asked.values()))
        tell = partial(context.report.activity, f"asking the base model about {count:,} harmless requests")
        ask = partial(would_refuse, context.base, openings=own.openings, threshold=threshold, limit=limit, tell=tell)
        return {name: [*ask(prompts)] for name, prompts in asked.items()}

    found: dict[str, list[int]] = context.cache.json("over_refusal", key, make)
    return OverRefusal({name: (refused, count) for name, (refused, count) in found.items()})


def excuse(
    examples: Sequence[Example], flagged: Sequence[FlaggedRow], known: KnownRequests, measured: OverRefusal
) -> list[FlaggedRow]:
    """Mark the flagged rows that the base model's over-refusal explains as excused.

    A row for which only the base model's refusal speaks, and which asks nothing harmful, is excused if it is near to a
    known harmless request. The remaining such rows are all excused if the lower 95 % bound of the base model's
    over-refusal exceeds `MAX_ERROR` and these rows are at most that share of the file's ordinary rows; otherwise none
    of them is.
    """
    near = {each.place: known.nearness(_requests(examples[each.place])) for each in flagged}
    alone = [each.place for each in flagged if _is_alone(each, examples[each.place]) and near[each.place][0] < NEAR]
    excused = {place for place in alone if near[place][1] >= NEAR}
    left = [place for place in alone if place not in excused]
    # Rows that ask for known harm say nothing about over-refusal and do not count as ordinary.
    ordinary = len(examples) - sum(harmful >= NEAR for harmful, _ in near.values())
    share = rate(measured.refused_count, measured.asked_count).low
    if share > MAX_ERROR and len(left) <= share * ordinary:
        excused.update(left)
    excused = distributed.broadcast_object(excused)
    return [replace(each, is_excused=each.place in excused) for each in flagged]


def tell_over_refusal(context: Context, measured: OverRefusal, flagged: Sequence[FlaggedRow]) -> None:
    """Report the base model's over-refusal, as a warning if it is high, and the number of excused rows."""
    if not measured.refused_count:
        return
    parts = "; ".join(f"{hits} of {n} of {name}" for name, (hits, n) in measured.sources.items() if hits)
    text = f"The base model would refuse {measured.refused_count} of {measured.asked_count} harmless requests ({parts})"
    excused = sum(each.is_excused for each in flagged)
    rows = f"{excused} rows without other evidence are excused" if excused else "no row is excused for that"
    is_much = any(rate(hits, n).low > MAX_ERROR for hits, n in measured.sources.values())
    facts: dict[str, object] = {
        "sources": {name: [*each] for name, each in measured.sources.items()},
        "excused": excused,
    }
    level = "warn" if is_much else "info"
    context.report.event(f"{text}, so its refusal of a row is weak evidence of harm: {rows}.", facts, level=level)


def _with_second_reason(each: FlaggedRow, row: Example, known: KnownRequests) -> FlaggedRow:
    if each.verdict != "harmful" or any(imitates(answer) for _, answer in exchanges(row)):
        return each
    harmful, harmless = known.nearness(decode_text(last_request(row)))
    if harmful >= NEAR and harmful > harmless:
        return each
    return replace(each, verdict="doubtful" if known.nearness(_requests(row))[0] >= NEAR else "undecided")


def _is_alone(each: FlaggedRow, row: Example) -> bool:
    """Return True if only the base model's refusal speaks for harm; False for a pair that rejects a refusal."""
    return each.by_base and each.verdict in (None, "undecided") and not prefers_to_refusal(row)


def _requests(row: Example) -> str:
    """Return all user turns of a row, decoded."""
    return exchanges(row)[-1][0] if exchanges(row) else prompt_text(row)


def _prompts(rows: Sequence[Example]) -> list[str]:
    """Return the prompts of at most `MOST` rows of a pool, evenly spaced: a pool may have millions."""
    return [prompt_text(row) for row in sample(rows, MOST)]
