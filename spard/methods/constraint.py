"""The constraint that SPAG keeps, how it is violated, and the projection onto its linear model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from spard.config import Auto
from spard.losses.gradients import Loss
from spard.losses.vectors import Vector, add_, dot
from spard.methods.base import Metrics, require_finite

METRIC = {
    "mean": "loss/safe",
    "prefix": "loss/safe_prefix",
    "excess": "loss/safe_excess",
    "excess_prefix": "loss/safe_excess_prefix",
}


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
        """How far to bring the loss down, in nats per token; the margin lies below tau."""
        return self.excess + self.margin


class Correction(Protocol):
    """What a variant does about a violation: change `theta`, just moved by `optimizer`, in place."""

    def __call__(self, theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        """Correct `theta` in place along the violated loss's gradient, and return the `spag/` metrics."""
        ...


@runtime_checkable
class StatefulCorrection(Protocol):
    """A correction that remembers; what `state` gives goes into every checkpoint, and `restore` goes on from it."""

    def state(self) -> dict[str, Tensor]:
        """Return what is remembered between violations, as tensors by name; empty before the first one."""
        ...

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, for parameters in the same order."""
        ...


def most_violated(losses: Mapping[str, Loss], constraint: Constraint) -> Violation | None:
    """Return the constrained loss with the largest l - tau, if that exceeds delta; else None."""
    require_finite("safe", *(loss.value for loss in losses.values()))
    excess = {name: losses[name].value - tau for name, tau in constraint.tau.items()}
    worst = max(excess, key=excess.__getitem__)
    if excess[worst] <= constraint.delta:
        return None
    return Violation(losses[worst], excess[worst], constraint.margin)


def project_(theta: Vector, violation: Violation, *, radius: float = math.inf, eta_safe: float = math.inf) -> Metrics:
    """Project: theta <- theta - alpha g; a gradient that is not finite is counted, and theta left as it is.

    alpha is at most `eta_safe`, and |alpha g| at most `radius`.
    """
    grad = violation.loss.grad()
    sq_norm = dot(grad, grad)
    if not math.isfinite(sq_norm):
        return step_metrics(triggered=True, skipped=True)
    max_step = min(eta_safe, radius / math.sqrt(sq_norm)) if sq_norm else 0.0
    alpha = halfspace_step(violation.descent, sq_norm, max_step)
    add_(theta, grad, -alpha)
    return step_metrics(triggered=True, alpha=alpha, capped=alpha >= max_step, length=alpha * math.sqrt(sq_norm))


def halfspace_step(violation: float, sq_norm: float, max_step: float) -> float:
    r"""Step length alpha that projects theta onto a linearized safety constraint.

    The point of {theta' : l(theta) + g.(theta' - theta) <= tau} nearest to theta is theta - alpha g with
    alpha = [l(theta) - tau]_+ / |g|^2 (SPARD, Algorithm 1). `max_step` caps alpha: the linear model is trusted only
    nearby. `violation` is l(theta) - tau and `sq_norm` is |g|^2.
    """
    return min(violation / sq_norm, max_step) if violation > 0 and sq_norm > 0 else 0.0


def learning_rate(optimizer: Optimizer) -> float:
    """lr_t, the rate of the utility step just taken."""
    return float(optimizer.param_groups[0]["lr"])


def or_auto(eta_safe: float | Auto, auto: float) -> float:
    """eta_safe, or what stands for it in a variant."""
    return auto if eta_safe == "auto" else eta_safe


def values(losses: Mapping[str, Loss]) -> Metrics:
    """Return the safe losses as metrics."""
    return {METRIC.get(name, f"loss/safe_{name}"): loss.value for name, loss in losses.items()}


def step_metrics(
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
