"""The order in which a judge reads training rows: the likeliest harm first, given its verdicts so far.

A judge is slow, and its verdicts show which rows it should read next: continuous active learning (Cormack and
Grossman, SIGIR 2014), here on the words that rows share (`spard.evaluation.word_features`). A third of the rows is
chosen by likeness to the pool's requests, a third by likeness to the rows found harmful; likeness to the rows found
harmless is subtracted from both. The rest is chosen at random, which no attacker can evade.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from spard.data.rows import Example
from spard.evaluation.word_features import FeatureSets, features_of_row, text_features, word_window

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
