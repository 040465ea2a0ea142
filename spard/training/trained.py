"""The result of a training run, and the progress that resume states keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spard.methods.base import Metrics
from spard.training.best import Ended
from spard.training.references import References


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, a `PeftModel` or a whole model, with the metrics of each step.

    seconds     time spent in steps, over all attempts of the run.
    ended       the epoch end that was released, if epochs were compared.
    references  reference log-probabilities of preference pairs, for DPO.
    """

    model: Any = field(repr=False)
    steps: int
    trained_tokens: int
    seconds: float
    tau: dict[str, float]
    metrics: list[Metrics] = field(repr=False)
    references: References | None = field(default=None, repr=False)
    ended: Ended | None = None  # the released epoch end, if they were compared


@dataclass(slots=True)
class Progress:
    """The part of a resume state beside parameters, optimizer and method."""

    step: int = 0
    tokens: int = 0
    safe_batches: int = 0
    seconds: float = 0.0
    tau: dict[str, float] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)
