"""The result of a training run, and the progress that resume states keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spard.methods.base import Metrics
from spard.training.best import Ended
from spard.training.references import References


@dataclass(frozen=True, slots=True)
class Compute:
    """What a training computed on all its processes; see `spard.training.operations` and `spard.training.energy`.

    operations       floating-point ones; None where a part of the run was made by a version that did not count them
    forward_tokens   padded tokens of the forward passes, and of the backward passes
    energy_j         joules by device, of the first node's devices; empty where nothing could be read
    energy_missing   why there is none of some device
    """

    operations: int | None
    forward_tokens: int
    backward_tokens: int
    energy_j: Mapping[str, float]
    energy_missing: tuple[str, ...] = ()


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
    compute: Compute | None = None


@dataclass(slots=True)
class Progress:
    """The part of a resume state beside parameters, optimizer and method."""

    step: int = 0
    tokens: int = 0
    safe_batches: int = 0
    seconds: float = 0.0
    tau: dict[str, float] = field(default_factory=dict)
    metrics: list[Metrics] = field(default_factory=list)
    operations: int | None = 0  # floating-point ones; None where those before a restart were not counted
    forward_tokens: int = 0
    backward_tokens: int = 0
    energy_j: dict[str, float] = field(default_factory=dict)

    def add_compute(self, operations: int, forward_tokens: int, backward_tokens: int) -> None:
        """Add what some passes took."""
        if self.operations is not None:
            self.operations += operations
        self.forward_tokens += forward_tokens
        self.backward_tokens += backward_tokens

    def add_energy(self, used: Mapping[str, float]) -> None:
        """Add joules by device."""
        for name, joules in used.items():
            self.energy_j[name] = self.energy_j.get(name, 0.0) + joules
