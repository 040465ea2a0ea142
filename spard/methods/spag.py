r"""SPAG, the optimiser of SPARD (Chen et al., ICML 2026, Algorithm 1).

    theta+ = AdamW(theta, grad L_task);   theta = theta+ - alpha g,   g = grad L_safe(theta+),   if L_safe(theta+) > tau

Two safe losses l may be bounded, each by its own tau: the token mean and the mean over each answer's first tokens.
The one that is violated more is projected on. All variants run the safety forward without dropout and go backward
only when the constraint is violated; they differ in the safety half of the step. Two of them stand here:

trust_region   alpha = min((l - tau) / |g|^2, R / |g|) with R = eta_safe lr sqrt(N k) for N parameters and a look at
               the safe loss every k steps. The paper caps alpha by the learning rate, which is a length in units of
               plain gradient descent and, under AdamW, far too short to matter; R is about as far as AdamW goes in k
               steps. Applied to theta, past the optimizer.
closed_form    the paper: alpha = min((l - tau) / |g|^2, eta_safe), eta_safe = lr.

With a margin m both aim at tau - m: an exact projection leaves the model on the boundary. The other variants are
`reference`, `preconditioned` and `gated`, a file each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from spard.config import Auto
from spard.grads import Loss, Losses, ValueAndGrad
from spard.methods.base import Metrics, Stateful, require_finite, utility_step_
from spard.projections import halfspace_step
from spard.vectors import Vector, add_, dot, size

METRIC = {"mean": "loss/safe", "prefix": "loss/safe_prefix"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Keep each loss named in `tau` at or below its tau; ignore violations up to delta, aim at tau - margin.

    `every` is the number of utility steps between two looks.
    """

    tau: Mapping[str, float]
    delta: float = 0.0
    eta_safe: float | Auto = "auto"
    margin: float = 0.0
    every: int = 1


@dataclass(frozen=True, slots=True)
class Violation:
    """The safe loss that exceeds its tau most, by how much, and how far to bring it down: to tau - margin."""

    loss: Loss
    excess: float
    margin: float = 0.0

    @property
    def descent(self) -> float:
        return self.excess + self.margin


class SafetyStep(Protocol):
    """The safety half of a step: `theta`, just moved by `optimizer`, is corrected in place if it must be."""

    def __call__(self, theta: Vector, safe: Losses, optimizer: Optimizer, constraint: Constraint) -> Metrics: ...


@dataclass(frozen=True, slots=True)
class SpagStep:
    """One iteration: the utility step, then the safety half of a variant."""

    safety: SafetyStep
    constraint: Constraint

    def __call__(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        # Utility:  theta <- AdamW(theta, grad L_task)
        metrics = utility_step_(theta, task, optimizer)

        # Safety:   theta <- theta - alpha g   if L_safe(theta) > tau
        return metrics | self.safety(theta, safe, optimizer, self.constraint)

    def state(self) -> dict[str, Tensor]:
        return self.safety.state() if isinstance(self.safety, Stateful) else {}

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        if isinstance(self.safety, Stateful):
            self.safety.restore(theta, state)


def trust_region_(theta: Vector, safe: Losses, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """alpha = min((l - tau) / |g|^2, R / |g|): no longer than the utility optimizer's own way since the last look."""
    losses = safe()
    violation = most_violated(losses, constraint)
    reach = learning_rate(optimizer) * math.sqrt(size(theta) * constraint.every)
    radius = or_auto(constraint.eta_safe, 1.0) * reach
    return values(losses) | (_project_(theta, violation, radius=radius) if violation else moved())


def closed_form_(theta: Vector, safe: Losses, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """alpha = min((l - tau) / |g|^2, eta_safe): Algorithm 1 as printed, in units of plain gradient descent."""
    losses = safe()
    violation = most_violated(losses, constraint)
    eta_safe = or_auto(constraint.eta_safe, learning_rate(optimizer))
    return values(losses) | (_project_(theta, violation, eta_safe=eta_safe) if violation else moved())


def most_violated(losses: Mapping[str, Loss], constraint: Constraint) -> Violation | None:
    """The constrained loss with the largest l - tau, if that exceeds delta."""
    require_finite("safe", *(loss.value for loss in losses.values()))
    excess = {name: losses[name].value - tau for name, tau in constraint.tau.items()}
    worst = max(excess, key=excess.__getitem__)
    if excess[worst] <= constraint.delta:
        return None
    return Violation(losses[worst], excess[worst], constraint.margin)


def learning_rate(optimizer: Optimizer) -> float:
    """lr_t, the rate of the utility step just taken."""
    return float(optimizer.param_groups[0]["lr"])


def or_auto(eta_safe: float | Auto, auto: float) -> float:
    """eta_safe, or what stands for it in a variant."""
    return auto if eta_safe == "auto" else eta_safe


def values(losses: Mapping[str, Loss]) -> Metrics:
    """The safe losses as metrics."""
    return {METRIC.get(name, f"loss/safe_{name}"): loss.value for name, loss in losses.items()}


def moved(
    *, triggered: bool = False, alpha: float = 0.0, capped: bool = False, skipped: bool = False, length: float = 0.0
) -> Metrics:
    """How the safety half of a step ended; `spag/step` is |alpha g|, `spag/skipped` counts gradients not finite."""
    return {
        "spag/alpha": alpha,
        "spag/triggered": float(triggered),
        "spag/capped": float(capped),
        "spag/skipped": float(skipped),
        "spag/step": length,
    }


def _project_(theta: Vector, violation: Violation, *, radius: float = math.inf, eta_safe: float = math.inf) -> Metrics:
    """theta <- theta - alpha g; a gradient that is not finite leaves the utility step as it is, and is counted."""
    grad = violation.loss.grad()
    sq_norm = dot(grad, grad)
    if not math.isfinite(sq_norm):
        return moved(triggered=True, skipped=True)
    max_step = min(eta_safe, radius / math.sqrt(sq_norm)) if sq_norm else 0.0
    alpha = halfspace_step(violation.descent, sq_norm, max_step)
    add_(theta, grad, -alpha)
    return moved(triggered=True, alpha=alpha, capped=alpha >= max_step, length=alpha * math.sqrt(sq_norm))
