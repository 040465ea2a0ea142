"""What a run of the training loop has come to: the trained model, and what is saved of one that goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spard.methods.base import Metrics
from spard.training.best import Ended
from spard.training.references import References


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, a `PeftModel` or the whole one, and what each step reported."""

    model: Any = field(repr=False)
    steps: int
    trained_tokens: int
    seconds: float
    tau: dict[str, float]
    metrics: list[Metrics] = field(repr=False)
    references: References | None = field(default=None, repr=False)
    ended: Ended | None = None  # with which end of an epoch, where they were compared


@dataclass(slots=True)
class Progress:
    """What is saved beside parameters and optimizer."""

    step: int = 0
    tokens: int = 0
    safe_batches: int = 0
    seconds: float = 0.0
    tau: dict[str, float] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)
