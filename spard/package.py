"""The papers of a run: metrics as CSV in OpenAI's columns, and the safety report."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from spard.audit import SuiteResult
from spard.gate import Gate
from spard.losses import Evaluation

OPENAI_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_OURS = {"loss/task": "train_loss", "accuracy/task": "train_accuracy"}


@dataclass(frozen=True, slots=True)
class Measured:
    """What the audit found on the base model and on the trained one, and what the gate made of it."""

    base: Sequence[SuiteResult]
    adapter: Sequence[SuiteResult]
    gate: Gate


def metrics_csv(metrics: Sequence[Mapping[str, float]], validation: Evaluation | None = None) -> str:
    """One line for each step; validation was measured once, after the last."""
    rows: list[dict[str, Any]] = [
        {"step": step} | {_OURS.get(name, name): value for name, value in each.items()}
        for step, each in enumerate(metrics, start=1)
    ]
    if rows and validation:
        rows[-1] |= {"valid_loss": validation.loss, "valid_mean_token_accuracy": validation.accuracy}
    names = dict.fromkeys(name for row in rows for name in row)  # a defence may report now and then
    extra = [name for name in names if name not in OPENAI_COLUMNS]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*OPENAI_COLUMNS, *extra], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def trigger_rate(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """The share of steps after which the safe loss was too high; none without a defence."""
    triggered = [each["spag/triggered"] for each in metrics if "spag/triggered" in each]
    return fmean(triggered) if triggered else None


def triggered_steps(metrics: Sequence[Mapping[str, float]]) -> int | None:
    """After how many steps the safe loss was too high; none without a defence."""
    triggered = [each["spag/triggered"] for each in metrics if "spag/triggered" in each]
    return int(sum(triggered)) if triggered else None


def safety_report(measured: Measured, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Both models' results on every suite with their intervals, the gate's decision, and the facts of the run."""
    return {
        **facts,
        "gate": asdict(measured.gate),
        "base": [asdict(each) for each in measured.base],
        "adapter": [asdict(each) for each in measured.adapter],
    }
