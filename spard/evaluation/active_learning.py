"""In which order a judge reads rows: those likeliest to be harm first, given what it has found so far.

A judge is slow, and its verdicts say which rows it should read next: continuous active learning (Cormack and Grossman,
SIGIR 2014), here with a language model of single words and pairs of words for each class, smoothed by Dirichlet's prior
(Zhai and Lafferty, TOIS 2004). With f_c the share of a class's texts that have a feature, n_c their number, and f the
share of all rows that have it, a row's likeness to the class is the mean over its features of

    log((n_c f_c / f + PRIOR) / (n_c + PRIOR)).

A third of the rows is chosen by likeness to the pool's requests, a third by likeness to the rows in which harm was
found, each less the likeness to the rows that were found harmless. The rest is chosen at random, since nobody can hide
from that.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from zlib import crc32

import torch
from torch import Tensor

from spard.data.encodings import decoded
from spard.data.rows import Example, is_learned

PRIOR = 10.0  # texts that are added to a class, as all rows are
WORDS = 64  # that are looked at from each end of a text, and fewer in files of many rows
MOST_FEATURES = 20_000_000  # about so many of all rows are held, at 4 bytes each and 12 while they are weighed
MOST_ASKED = 2000  # requests of the pool that are looked at, evenly spaced
_BUCKETS = 1 << 20  # of each side of a row: features are told apart by their hash
_PER_WORD = 8  # features for each word from an end: two sides of a row, two ends, words and pairs


class ReadingOrder:
    """The rows of a file and the requests of a safety pool, as sets of features; it says what is read next."""

    def __init__(self, rows: Sequence[Example], requests: Sequence[str], seed: int) -> None:
        words = min(WORDS, max(4, MOST_FEATURES // (_PER_WORD * max(1, len(rows)))))
        self._rows = _Sets(
            _features(_said(row, "user", "system"), words)
            | {_BUCKETS + each for each in _features(_said(row, "assistant"), words)}
            for row in rows
        )
        spaced = requests[:: max(1, -(-len(requests) // MOST_ASKED))]
        self._pool = _Sets(_features([text], words) for text in spaced)
        self._random = random.Random(seed)

    def next(self, unread: Sequence[int], harmful: Sequence[int], harmless: Sequence[int], count: int) -> list[int]:
        """Return the places of up to `count` unread rows to read next, none twice."""
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


class _Sets:
    """Sets of features in one flat tensor: the features, and the set that each is in."""

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

    def likeness(self, of: _Sets, places: Sequence[int], *, of_requests: bool = False) -> Tensor:
        """Return how alike each of these sets is to the class of those sets of `of` that stand at `places`.

        `of_requests` compares the features of requests alone.
        """
        n, most = len(places), _BUCKETS if of_requests else 2 * _BUCKETS
        everywhere_V = self._share(range(len(self))).clamp(min=0.5 / max(1, len(self)))
        weight_V = torch.log((n * of._share(places) / everywhere_V + PRIOR) / (n + PRIOR))
        is_kept_F = self._features_F < most
        set_F, weight_F = self._set_F[is_kept_F], weight_V[self._features_F[is_kept_F]]
        sums_N = torch.zeros(len(self), dtype=torch.float64).index_add_(0, set_F, weight_F)
        return sums_N / torch.bincount(set_F, minlength=len(self)).clamp(min=1)

    def _share(self, places: Iterable[int]) -> Tensor:
        """Return, for each feature, the share of the sets at `places` that have it."""
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[torch.tensor(list(places), dtype=torch.int64)] = True
        counts_V = torch.bincount(self._features_F[chosen[self._set_F]], minlength=2 * _BUCKETS)
        return counts_V.double() / max(1, int(chosen.sum()))


def _said(row: Example, *roles: str) -> list[str]:
    """Return what these roles say, decoded; of the assistant only what is learned."""
    spoken = [turn for turn in row.messages if turn["role"] in roles]
    texts = [turn.get("content") for turn in spoken if turn["role"] != "assistant" or is_learned(turn)]
    return [decoded(text) for text in texts if isinstance(text, str)]


def _features(texts: Sequence[str], most: int) -> set[int]:
    """Return the hashes of the single words and pairs of words among the first and last `most` words of each text."""
    found: set[int] = set()
    for text in texts:
        words = text.lower().split()
        words = words if len(words) <= 2 * most else [*words[:most], *words[-most:]]
        pairs = (" ".join(pair) for pair in pairwise(words))
        found.update(crc32(each.encode()) % _BUCKETS for each in chain(words, pairs))
    return found
