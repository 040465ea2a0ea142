"""The safety constraint of SPAG, its violations, and the projection onto the linearized constraint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from spard.config import Auto
from spard.losses.gradients import Loss
from spard.losses.vectors import Vector, add_, dot, norm
from spard.methods.base import Metrics, descend_, require_finite

METRIC = {
    "mean": "loss/safe",
    "prefix": "loss/safe_prefix",
    "excess": "loss/safe_excess",
    "excess_prefix": "loss/safe_excess_prefix",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Keep each loss named in `tau` at or below its bound.

    tau       bounds in nats per token, by the name of the safe loss.
    delta     violations of at most `delta` are ignored.
    eta_safe  cap of the safety step, in the units of the variant; "auto" is the variant's own default.
    margin    a correction aims at tau - margin.
    every     utility steps between two evaluations of the safe losses.
    """

    tau: Mapping[str, float]
    delta: float = 0.0
    eta_safe: float | Auto = "auto"
    margin: float = 0.0
    every: int = 1


@dataclass(frozen=True, slots=True)
class Violation:
    """The safe loss that exceeds its tau most: `excess` is l - tau, in nats per token."""

    loss: Loss
    excess: float
    margin: float = 0.0

    @property
    def descent(self) -> float:
        """The decrease of the loss that a correction aims at, in nats per token: l - (tau - margin)."""
        return self.excess + self.margin


class Correction(Protocol):
    """The part of a SPAG variant that moves `theta`, just updated by `optimizer`, back toward the constraint."""

    def __call__(self, theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        """Correct `theta` in place along the gradient of the violated loss, and return the `spag/` metrics."""
        ...


@runtime_checkable
class StatefulCorrection(Protocol):
    """A correction with state of its own, such as moments; resume states keep it."""

    def state(self) -> dict[str, Tensor]:
        """Return the state as tensors by name; empty before the first violation."""
        ...

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; `theta` lists the parameters in the same order."""
        ...


def most_violated(losses: Mapping[str, Loss], constraint: Constraint) -> Violation | None:
    """Return the constrained loss with the largest l - tau if that exceeds delta, else None.

    Raises `NonFiniteLoss` if any safe loss is not finite.
    """
    require_finite("safe", *(loss.value for loss in losses.values()))
    excess = {name: losses[name].value - tau for name, tau in constraint.tau.items()}
    worst = max(excess, key=excess.__getitem__)
    if excess[worst] <= constraint.delta:
        return None
    return Violation(losses[worst], excess[worst], constraint.margin)


def project_(theta: Vector, violation: Violation, *, radius: float = math.inf, eta_safe: float = math.inf) -> Metrics:
    """Project in place: theta <- theta - alpha g, with g the gradient of the violated loss; return the `spag/` metrics.

    alpha is at most `eta_safe`, and the step length |alpha g| at most `radius`. If g is not finite, theta is unchanged
    and `spag/skipped` is 1.
    """
    grad = violation.loss.grad()
    # A bad safety gradient skips the projection, not the run: the utility step before it was finite.
    sq_norm = dot(grad, grad)
    if not math.isfinite(sq_norm):
        return step_metrics(triggered=True, skipped=True)
    if not sq_norm:
        return step_metrics(triggered=True)
    max_step = min(eta_safe, radius / math.sqrt(sq_norm))
    alpha = halfspace_step(violation.descent, sq_norm, max_step)
    add_(theta, grad, -alpha)
    return step_metrics(triggered=True, alpha=alpha, capped=alpha >= max_step, length=alpha * math.sqrt(sq_norm))


def halfspace_step(violation: float, sq_norm: float, max_step: float) -> float:
    r"""Return the step length alpha that projects theta onto a linearized safety constraint.

    The point of {theta' : l(theta) + g.(theta' - theta) <= tau} nearest to theta is theta - alpha g with

        alpha = [l(theta) - tau]_+ / |g|^2        (SPARD, ICML 2026, Algorithm 1)

    violation  l(theta) - tau.
    sq_norm    |g|^2.
    max_step   cap on alpha, because the linear model holds only near theta.

        >>> halfspace_step(violation=0.5, sq_norm=4.0, max_step=1.0)
        0.125
    """
    return min(violation / sq_norm, max_step) if violation > 0 and sq_norm > 0 else 0.0


def optimizer_step_(optimizer: Optimizer, theta: Vector, grad: Vector) -> float:
    """Take one step of the optimizer along `grad`, and return its length: the norm of the change of theta."""
    change = [part.detach().clone() for part in theta]
    descend_(optimizer, theta, grad)
    add_(change, theta, -1.0)
    return float(norm(change))


def learning_rate(optimizer: Optimizer) -> float:
    """Return lr_t, the learning rate of the last utility step."""
    return float(optimizer.param_groups[0]["lr"])


def or_auto(eta_safe: float | Auto, auto: float) -> float:
    """Return `eta_safe`, or the variant's default `auto` where the setting is "auto"."""
    return auto if eta_safe == "auto" else eta_safe


def values(losses: Mapping[str, Loss]) -> Metrics:
    """Return the safe losses as metrics."""
    return {METRIC.get(name, f"loss/safe_{name}"): loss.value for name, loss in losses.items()}


def step_metrics(
    *, triggered: bool = False, alpha: float = 0.0, capped: bool = False, skipped: bool = False, length: float = 0.0
) -> Metrics:
    """Return the metrics of the safety half of a step.

    `spag/triggered` is 1 after a violation, `spag/capped` where the cap shortened the step, `spag/skipped` where the
    gradient was not finite; `spag/step` is the length of the step, the norm of the change of theta.
    """
    return {
        "spag/alpha": alpha,
        "spag/triggered": float(triggered),
        "spag/capped": float(capped),
        "spag/skipped": float(skipped),
        "spag/step": length,
    }
