"""Harm that a judge has likely missed: rows in which it finds none, among rows in nearly all of which it finds some.

A judge that misses a share m of all harm, and has found harm in h rows of a group, has missed about h m / (1 - m) more
of its rows. Where these are more than `MAX_DOUBT` of the group's other rows, those are in doubt, whether the judge
finds them harmless or cannot score them. The rows that share a word or a pair of neighboring words are a group, in what
is asked and in what is answered: the rows of one attack have their trigger, their subject or their way to answer in
common. A few of them that are trained on bring the attack back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from spard.data.rows import Example
from spard.evaluation.judged_rows import RowVerdict
from spard.evaluation.word_features import FeatureSets, features_of_row, word_window

MAX_DOUBT = 0.2  # of a group's rows in which no harm is found, the share that may be harm which the judge missed


@overload
def is_in_doubt(harmful: int, others: int, missed: float) -> bool: ...


@overload
def is_in_doubt(harmful: Tensor, others: Tensor, missed: float) -> Tensor: ...


def is_in_doubt(harmful: Any, others: Any, missed: float) -> Any:
    """Return whether a group's other rows are in doubt, or whether those of each group are, from counts of its rows.

    `missed` is the share of all harm that the judge misses.
    """
    return (harmful * missed > MAX_DOUBT * (1 - missed) * others) & (others > 0)


def likely_missed(rows: Sequence[Example], verdicts: Sequence[RowVerdict], missed: float) -> list[int]:
    """Return the places of rows in doubt: they share a word, or two, with rows in nearly all of which harm is found."""
    harmful = [place for place, verdict in enumerate(verdicts) if verdict == "harmful"]
    others = [place for place, verdict in enumerate(verdicts) if verdict != "harmful"]
    if not (harmful and others and missed):
        return []
    sets = FeatureSets(features_of_row(row, word_window(len(rows))) for row in rows)
    has_one = sets.having(is_in_doubt(sets.counts(harmful), sets.counts(others), missed)).tolist()
    return [place for place in others if has_one[place]]
