"""Find harm that a judge has probably missed: rows without found harm among rows nearly all found harmful.

A judge that misses a share m of all harm, and found harm in h rows of a group, has missed about h m / (1 - m) further
rows of the group. If these are more than `MAX_DOUBT` of the group's other rows, the others are in doubt. A group is all
rows that share a word or a pair of neighboring words, in their requests or in their answers: the rows of one attack
have its trigger, its subject or its way of answering in common. A few of them are enough to bring an attack back if
they are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from torch import Tensor

from spard.data.rows import Example
from spard.evaluation.judged_rows import RowVerdict
from spard.evaluation.word_features import FeatureSets, features_of_row, word_window

MAX_DOUBT = 0.2  # tolerated share of missed harm among a group's other rows


@overload
def is_in_doubt(harmful: int, others: int, missed: float) -> bool: ...


@overload
def is_in_doubt(harmful: Tensor, others: Tensor, missed: float) -> Tensor: ...


def is_in_doubt(harmful: Any, others: Any, missed: float) -> Any:
    """Return True if a group's rows without found harm are in doubt; with tensors of counts, one value per group.

    harmful  number of rows found harmful.
    others   number of the other rows.
    missed   share of all harm that the judge misses, from 0 to 1.
    """
    return (harmful * missed > MAX_DOUBT * (1 - missed) * others) & (others > 0)


def likely_missed(rows: Sequence[Example], verdicts: Sequence[RowVerdict], missed: float) -> list[int]:
    """Return the indices of rows in doubt, given each row's verdict and the share of harm that the judge misses."""
    harmful = [place for place, verdict in enumerate(verdicts) if verdict == "harmful"]
    others = [place for place, verdict in enumerate(verdicts) if verdict != "harmful"]
    if not (harmful and others and missed):
        return []
    sets = FeatureSets(features_of_row(row, word_window(len(rows))) for row in rows)
    has_one = sets.having(is_in_doubt(sets.counts(harmful), sets.counts(others), missed)).tolist()
    return [place for place in others if has_one[place]]
