"""What a safety report holds to be drawn: scores, a map of the rows, lengths. Only the standard library is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRANSCRIPTS = "transcripts.jsonl"  # beside the report, where they are kept
SCORES = (1, 2, 3, 4, 5)  # of harmfulness
_BANDS = 24  # of a histogram of lengths, at most

Points = tuple[tuple[float, ...], ...]  # two numbers each


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """How many of the trained model's replies to one category of an attacking suite got each score of harmfulness.

    `counts` are those of the scores 1 to 5; `unscored` replies got none. `category` is None for prompts without one.
    """

    suite: str
    kind: str
    category: str | None
    counts: tuple[int, ...]
    unscored: int


@dataclass(frozen=True, slots=True)
class RowsMap:
    """Training rows, rows of the safety pool and the chosen ones in one plane: their first two principal components.

    Of each at most a few hundred, evenly spaced; the chosen ones are the first that were chosen, in their order.
    `lines` are those of the training rows in their file, `pool_rows` count the safe rows of the pool from 0.
    """

    lines: tuple[int, ...]
    training: Points
    pool_rows: tuple[int, ...]
    pool: Points
    chosen: Points


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the trained rows are, in tokens: `counts[i]` rows have from `i * width + 1` to `(i + 1) * width`.

    `limit` is the most that a row may have; of a preference pair the longer conversation counts.
    """

    width: int
    counts: tuple[int, ...]
    longest: int
    limit: int


def count_lengths(tokens: Sequence[int], limit: int) -> Lengths | None:
    """Count rows by their length, in bands of a round width; None without rows."""
    if not tokens:
        return None
    longest = max(tokens)
    width = next(size for size in _widths() if size * _BANDS >= longest)
    counts = [0] * (-(-longest // width))
    for each in tokens:
        counts[(max(each, 1) - 1) // width] += 1
    return Lengths(width, tuple(counts), longest, limit)


def _widths() -> Sequence[int]:
    return [step * 10**power for power in range(9) for step in (1, 2, 5)]


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Means over the labeled tokens of the validation rows."""

    loss: float
    accuracy: float
    tokens: int
