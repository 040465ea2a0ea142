"""The figures of a run: the metrics of every training step, and the data of a safety report's plots.

Metrics are written as CSV with OpenAI's columns, and aggregated. Plots show scores, a map of the rows, and lengths.
Uses only the standard library.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from spard.release.task_check import Losses

OPENAI_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_RENAMED = {
    "loss/task": "train_loss",
    "accuracy/task": "train_accuracy",
    "loss/valid": "valid_loss",
    "accuracy/valid": "valid_mean_token_accuracy",
}


def rename_metrics(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return a step's metrics under OpenAI's names, or ours where it has none."""
    return {_RENAMED.get(name, name): value for name, value in metrics.items()}


def metrics_csv(metrics: Sequence[Mapping[str, float]], validation: Losses | None = None, at: int | None = None) -> str:
    """Return a CSV with one line per step; `validation` is written to step `at` (default: the last)."""
    rows: list[dict[str, object]] = [
        {"step": step} | rename_metrics(each) for step, each in enumerate(metrics, start=1)
    ]
    if rows and validation:
        rows[-1 if at is None else at - 1] |= {
            "valid_loss": validation.loss,
            "valid_mean_token_accuracy": validation.accuracy,
        }
    names = dict.fromkeys(name for row in rows for name in row)  # methods may report some metrics only in some steps
    extra = [name for name in names if name not in OPENAI_COLUMNS]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*OPENAI_COLUMNS, *extra], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def trigger_rate(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """Return the share of steps after which a safe loss exceeded its bound; None for methods without a bound."""
    triggered = [each["spag/triggered"] for each in metrics if "spag/triggered" in each]
    return fmean(triggered) if triggered else None


def triggered_steps(metrics: Sequence[Mapping[str, float]]) -> int | None:
    """Count the steps at whose end a safe loss exceeded its bound; return None for methods without a bound."""
    triggered = [each["spag/triggered"] for each in metrics if "spag/triggered" in each]
    return int(sum(triggered)) if triggered else None


def checkpoint_metrics(metrics: Mapping[str, float], validation: Losses | None) -> dict[str, float]:
    """Return an epoch end's metrics under OpenAI's checkpoint names.

    `metrics` belong to the epoch's last step, `validation` to all validation rows. `valid_loss` is the step's own
    validation batch if it has one, else the loss on all rows.
    """
    found = {"train_loss": metrics["loss/task"], "train_mean_token_accuracy": metrics["accuracy/task"]}
    if validation is None:
        return found
    return found | {
        "valid_loss": metrics.get("loss/valid", validation.loss),
        "valid_mean_token_accuracy": metrics.get("accuracy/valid", validation.accuracy),
        "full_valid_loss": validation.loss,
        "full_valid_mean_token_accuracy": validation.accuracy,
    }


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
