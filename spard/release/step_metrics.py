"""The metrics of every training step: as CSV with OpenAI's columns, and their aggregates."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spard.losses.cross_entropy import Evaluation

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


def metrics_csv(
    metrics: Sequence[Mapping[str, float]], validation: Evaluation | None = None, at: int | None = None
) -> str:
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


def checkpoint_metrics(metrics: Mapping[str, float], validation: Evaluation | None) -> dict[str, float]:
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
