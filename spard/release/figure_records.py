"""The data of a safety report's plots: scores, a map of the rows, lengths. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRANSCRIPTS = "transcripts.jsonl"  # beside the report, if transcripts are kept
SCORES = (1, 2, 3, 4, 5)  # harmfulness scores
_BANDS = 24  # maximum bins of the histogram

Points = tuple[tuple[float, ...], ...]  # (x, y) each


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """Counts of the harmfulness scores of the trained model's replies to one category of an attack suite.

    `counts[i]` is the number of replies with score i + 1, for scores 1 to 5; `unscored` replies have none. `category`
    is None for prompts without one.
    """

    suite: str
    kind: str
    category: str | None
    counts: tuple[int, ...]
    unscored: int


@dataclass(frozen=True, slots=True)
class RowsMap:
    """Training rows, pool rows and chosen rows in the plane of their first two principal components.

    Each list has at most a few hundred points: evenly spaced rows, and the first chosen ones in order. `lines` are the
    training rows' lines in their file; `pool_rows` index the safe rows of the pool from 0.
    """

    lines: tuple[int, ...]
    training: Points
    pool_rows: tuple[int, ...]
    pool: Points
    chosen: Points


@dataclass(frozen=True, slots=True)
class Lengths:
    """A histogram of the trained rows' tokens: `counts[i]` rows have `i * width + 1` to `(i + 1) * width` tokens.

    `limit` is the maximum for a row; for a preference pair the longer conversation counts.
    """

    width: int
    counts: tuple[int, ...]
    longest: int
    limit: int


def count_lengths(tokens: Sequence[int], limit: int) -> Lengths | None:
    """Return the histogram of row lengths with a round bin width; None without rows."""
    if not tokens:
        return None
    longest = max(tokens)
    # The smallest width of 1, 2 or 5 times a power of ten with at most `_BANDS` bins.
    width = next(size for size in _widths() if size * _BANDS >= longest)
    counts = [0] * (-(-longest // width))
    for each in tokens:
        counts[(max(each, 1) - 1) // width] += 1
    return Lengths(width, tuple(counts), longest, limit)


def _widths() -> Sequence[int]:
    return [step * 10**power for power in range(9) for step in (1, 2, 5)]


@dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Mean loss (nats per token) and accuracy (0 to 1) over the labeled tokens of the validation rows."""

    loss: float
    accuracy: float
    tokens: int
