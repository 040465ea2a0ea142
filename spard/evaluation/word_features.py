"""Rows and requests as sets of features: hashes of their single words and pairs of neighboring words.

The likeness of a row to a class of texts is a likelihood ratio of two language models, smoothed with a Dirichlet prior
(Zhai and Lafferty, TOIS 2004). With f_c the share of the class's n_c texts that have a feature, and f the share of all
rows that have it, it is the mean over the row's features of

    log((n_c f_c / f + PRIOR) / (n_c + PRIOR)).

By it a judge reads the likeliest harm first (`ReadingOrder`). A judge is slow, and its verdicts show which rows it
should read next: continuous active learning (Cormack and Grossman, SIGIR 2014). A third of the rows is chosen by
likeness to the pool's requests, a third by likeness to the rows found harmful; likeness to the rows found harmless is
subtracted from both. The rest is chosen at random, which no attacker can evade.

By the same features, harm that a judge has probably missed is found among rows nearly all found harmful
(`likely_missed`). A judge that misses a share m of all harm, and found harm in h rows of a group, has missed about
h m / (1 - m) further rows of the group. If these are more than `MAX_DOUBT` of the group's other rows, the others are in
doubt. A group is all rows that share a word or a pair of neighboring words, in their requests or in their answers: the
rows of one attack have its trigger, its subject or its way of answering in common. A few of them are enough to bring an
attack back if they are trained on.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, overload
from zlib import crc32

import torch
from torch import Tensor

from spard.data.encodings import decode_text
from spard.data.rows import Example, is_learned
from spard.evaluation.disguises import text_ends
from spard.evaluation.judged_rows import RowVerdict

PRIOR = 10.0  # pseudo-texts, distributed like all rows, added to a class
WORDS = 64  # words used from each end of a text; fewer in files of many rows
MOST_FEATURES = 20_000_000  # most features in memory, at 4 bytes each and 12 during a comparison
_BUCKETS = 1 << 20  # hash values of each side of a row
_PER_WORD = 8  # features per word: two sides of a row, two ends, words and pairs


def word_window(rows: int) -> int:
    """Return how many words from each end of a text are used, in a file of this many rows."""
    return min(WORDS, max(4, MOST_FEATURES // (_PER_WORD * max(1, rows))))


def features_of_row(row: Example, words: int) -> set[int]:
    """Return the features of a row's requests and, numbered in a separate range, of its answers and tool calls."""
    answered = {_BUCKETS + each for each in text_features(_role_texts(row, "assistant"), words)}
    return text_features(_role_texts(row, "user", "system"), words) | answered


def text_features(texts: Sequence[str], most: int) -> set[int]:
    """Return the hashes of words and neighboring pairs among the first and last `most` words of each text."""
    found: set[int] = set()
    for text in texts:
        for words in text_ends(text.lower().split(), most):
            pairs = (" ".join(pair) for pair in pairwise(words))
            found.update(crc32(each.encode()) % _BUCKETS for each in chain(words, pairs))
    return found


class FeatureSets:
    """Sets of features in one flat tensor, for vectorized comparison."""

    def __init__(self, sets: Iterable[set[int]]) -> None:
        sizes, features = array("i"), array("i")
        for each in sets:
            sizes.append(len(each))
            features.extend(sorted(each))
        self._count = len(sizes)
        self._features_F = torch.tensor(features, dtype=torch.int32)
        numbers_N = torch.arange(self._count, dtype=torch.int32)
        self._set_F = torch.repeat_interleave(numbers_N, torch.tensor(sizes, dtype=torch.int32))

    def __len__(self) -> int:
        return self._count

    def likeness(self, of: FeatureSets, places: Sequence[int], *, of_requests: bool = False) -> Tensor:
        """Return the likeness of each set to a class of texts, `[N]`: the sets at `places` of the collection `of`.

        With `of_requests` only features of requests are compared.
        """
        n, most = len(places), _BUCKETS if of_requests else 2 * _BUCKETS
        # A feature of the class that no row has counts as half a row, so that the ratio stays finite.
        everywhere_V = self._share(range(len(self))).clamp(min=0.5 / max(1, len(self)))
        weight_V = torch.log((n * of._share(places) / everywhere_V + PRIOR) / (n + PRIOR))
        is_kept_F = self._features_F < most
        set_F, weight_F = self._set_F[is_kept_F], weight_V[self._features_F[is_kept_F]]
        sums_N = torch.zeros(len(self), dtype=torch.float64).index_add_(0, set_F, weight_F)
        return sums_N / torch.bincount(set_F, minlength=len(self)).clamp(min=1)

    def counts(self, places: Iterable[int]) -> Tensor:
        """Return, for each feature, the number of sets at `places` that have it."""
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[torch.tensor(list(places), dtype=torch.int64)] = True
        return torch.bincount(self._features_F[chosen[self._set_F]], minlength=2 * _BUCKETS)

    def having(self, wanted_V: Tensor) -> Tensor:
        """Return, for each set, True if it has one of the features marked in `wanted_V`."""
        found_N = torch.zeros(len(self), dtype=torch.bool)
        found_N[self._set_F[wanted_V[self._features_F]]] = True
        return found_N

    def _share(self, places: Sequence[int]) -> Tensor:
        """Return, for each feature, the share of the sets at `places` that have it."""
        return self.counts(places).double() / max(1, len(places))


def _role_texts(row: Example, *roles: str) -> list[str]:
    """Return the decoded texts of messages with these roles; assistant turns only if learned, with tool calls."""
    spoken = [turn for turn in row.messages if turn["role"] in roles]
    learned = [turn for turn in spoken if turn["role"] != "assistant" or is_learned(turn)]
    texts = [turn.get("content") for turn in learned]
    calls = [call["function"] for turn in learned for call in turn.get("tool_calls") or ()]
    called = [" ".join(_call_texts([call["name"], call["arguments"]])) for call in calls]
    return [*(decode_text(text) for text in texts if isinstance(text, str)), *called]


def _call_texts(value: object) -> Iterator[str]:
    """Yield every decoded text in a tool call: its name, and names and values of its arguments."""
    match value:
        case str():
            yield decode_text(value)
        case dict():
            for name, each in value.items():
                yield from (*_call_texts(name), *_call_texts(each))
        case list():
            for each in value:
                yield from _call_texts(each)


MOST_ASKED = 2000  # most requests of the pool compared with, evenly spaced


class ReadingOrder:
    """Choose the rows that a judge reads next, from the feature sets of a file's rows and of a pool's requests."""

    def __init__(self, rows: Sequence[Example], requests: Sequence[str], seed: int) -> None:
        words = word_window(len(rows))
        self._rows = FeatureSets(features_of_row(row, words) for row in rows)
        spaced = requests[:: max(1, -(-len(requests) // MOST_ASKED))]
        self._pool = FeatureSets(text_features([text], words) for text in spaced)
        self._random = random.Random(seed)

    def next(self, unread: Sequence[int], harmful: Sequence[int], harmless: Sequence[int], count: int) -> list[int]:
        """Return the indices of up to `count` distinct rows of `unread` to read next.

        `harmful` and `harmless` are the indices of the rows that the judge has read, by verdict.
        """
        chosen: dict[int, None] = {}
        rankings = [self._rows.likeness(self._pool, range(len(self._pool)), of_requests=True)]
        rankings += [self._rows.likeness(self._rows, harmful)] if harmful else []
        innocent_N = self._rows.likeness(self._rows, harmless)
        for likeness_N in rankings:
            score = (likeness_N - innocent_N).tolist()
            ranked = sorted((each for each in unread if each not in chosen), key=lambda each: (-score[each], each))
            chosen.update(dict.fromkeys(ranked[: count // 3]))
        rest = [each for each in unread if each not in chosen]
        return [*chosen, *self._random.sample(rest, min(len(rest), count - len(chosen)))]


MAX_DOUBT = 0.2  # tolerated share of missed harm among a group's other rows


@overload
def is_in_doubt(harmful: int, others: int, missed: float) -> bool: ...


@overload
def is_in_doubt(harmful: Tensor, others: Tensor, missed: float) -> Tensor: ...


def is_in_doubt(harmful: Any, others: Any, missed: float) -> Any:
    """Return True if the judge has probably missed harm in a group's other rows; with tensors, one value per group.

    harmful  number of rows found harmful.
    others   number of the other rows.
    missed   share of all harm that the judge misses, from 0 to 1.
    """
    return (harmful * missed > MAX_DOUBT * (1 - missed) * others) & (others > 0)


def likely_missed(rows: Sequence[Example], verdicts: Sequence[RowVerdict], missed: float) -> list[int]:
    """Return the indices of rows in which the judge has probably missed harm; see `is_in_doubt`."""
    harmful = [place for place, verdict in enumerate(verdicts) if verdict == "harmful"]
    others = [place for place, verdict in enumerate(verdicts) if verdict != "harmful"]
    if not (harmful and others and missed):
        return []
    sets = FeatureSets(features_of_row(row, word_window(len(rows))) for row in rows)
    has_one = sets.having(is_in_doubt(sets.counts(harmful), sets.counts(others), missed)).tolist()
    return [place for place in others if has_one[place]]
