r"""SPAG as a gated optimizer: a second AdamW, for safety alone, that steps only when the constraint is violated.

    theta <- AdamW_safe(theta, g),   lr_safe = eta_safe lr,   no weight decay

This is the idea of the authors' code with moments of its own: safety gradients do not leak into the following utility
steps, and stale utility momentum does not leak into the safety step. The step length does not depend on the
violation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.optim import AdamW, Optimizer

from spard.losses.vectors import Vector, dot
from spard.methods.base import Metrics
from spard.methods.constraint import (
    Constraint,
    Correction,
    Violation,
    learning_rate,
    optimizer_step_,
    or_auto,
    step_metrics,
)

_KEYS = ("step", "exp_avg", "exp_avg_sq")


def correction() -> Correction:
    """Return a new correction for each run, because it holds moments."""
    return Gated()


class Gated:
    """A correction that takes one step of its own AdamW."""

    def __init__(self) -> None:
        self.optimizer: AdamW | None = None

    def __call__(self, theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        """Step: theta <- AdamW_safe(theta, g); a gradient that is not finite is skipped."""
        grad = violation.loss.grad()
        if not math.isfinite(dot(grad, grad)):
            return step_metrics(triggered=True, skipped=True)
        own, rate = self._own_optimizer(theta), or_auto(constraint.eta_safe, 1.0) * learning_rate(optimizer)
        own.param_groups[0]["lr"] = rate
        return step_metrics(triggered=True, alpha=rate, length=optimizer_step_(own, theta, grad))

    def state(self) -> dict[str, Tensor]:
        """Return the moments and step counts by name; empty before the first violation."""
        parts = self.optimizer.param_groups[0]["params"] if self.optimizer else []
        states = [self.optimizer.state[part] for part in parts] if self.optimizer else []
        return {f"{key}/{i}": state[key] for i, state in enumerate(states) for key in _KEYS}

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Restore the moments; the optimizer is made here, because no violation has happened yet in this process."""
        if not state:
            return
        own = self._own_optimizer(theta)
        for i, part in enumerate(theta):
            own.state[part] = {key: state[f"{key}/{i}"].to(part.device) for key in _KEYS}

    def _own_optimizer(self, theta: Vector) -> AdamW:
        self.optimizer = self.optimizer or AdamW(list(theta), weight_decay=0.0, fused=True)
        return self.optimizer
