"""The safety half of a step, every few steps and after the last: what was broken since is mended at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.grads import Losses
from spard.methods.base import Metrics, Stateful
from spard.methods.spag import Constraint, SafetyStep
from spard.vectors import Vector

_CLOCK = "clock"


class Periodic:
    """A safety half that rests between; a step without it reports nothing of it."""

    def __init__(self, safety: SafetyStep, every: int, total_steps: int) -> None:
        self.safety, self.every, self.total_steps = safety, every, total_steps
        self.clock = 0

    def __call__(self, theta: Vector, safe: Losses, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        self.clock += 1
        if self.clock % self.every and self.clock != self.total_steps:
            return {}
        return self.safety(theta, safe, optimizer, constraint)

    def state(self) -> dict[str, Tensor]:
        """The clock, and what the safety half remembers."""
        inner = self.safety.state() if isinstance(self.safety, Stateful) else {}
        return {_CLOCK: torch.tensor(self.clock), **inner}

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        self.clock = int(state[_CLOCK])
        if isinstance(self.safety, Stateful):
            self.safety.restore(theta, {name: part for name, part in state.items() if name != _CLOCK})
