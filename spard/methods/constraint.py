"""The safety constraint of SPAG, its violations, and how each variant corrects theta after one.

`trust_region` is the default variant; `closed_form` is the paper's, and `reference` that of the authors' code. With a
margin m a variant aims at tau - m, because an exact projection leaves the model on the boundary; `reference` has no
margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from spard.config import Auto
from spard.config.defenses.spard import Variant
from spard.errors import InvalidRecipe
from spard.losses.gradients import Loss
from spard.losses.vectors import Vector, add_, dot, inner, norm, norms, scale_, size, total, wide
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


RELAXATION = 1.5
FLOOR = 1e-3
_KEYS = ("step", "exp_avg", "exp_avg_sq")


def open_correction(variant: Variant) -> Correction:
    """Return a variant's correction for one run; corrections that hold moments cannot be shared between runs."""
    stateless: Mapping[Variant, Correction] = {
        "trust_region": trust_region_,
        "preconditioned": precondition_,
        "closed_form": closed_form_,
        "reference": reference_,
    }
    return GatedOptimizer() if variant == "gated" else stateless[variant]


def trust_region_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Project, moving theta at most as far as the utility optimizer may have moved it since the last evaluation.

        alpha = min((l - tau) / |g|^2, R / |g|),   R = eta_safe lr sqrt(N k)

    for N parameters and an evaluation of the safe loss every k steps. The paper caps alpha by the learning rate: a
    length in units of plain gradient descent, which under AdamW is far too short to matter. R is about as far as AdamW
    moves in k steps. The step changes theta directly, without the optimizer.
    """
    reach = learning_rate(optimizer) * math.sqrt(size(theta) * constraint.every)
    return project_(theta, violation, radius=or_auto(constraint.eta_safe, 1.0) * reach)


def precondition_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Project to the nearest safe point in Adam's metric: theta <- theta - lambda g / H, each coordinate capped.

        min 1/2 |theta - theta+|_H^2   s.t.   l + g.(theta - theta+) <= tau - m,   H = diag(sqrt(v))

    where v is the utility optimizer's second moment. The solution is theta = theta+ - lambda g / H with
    lambda = (l - tau + m) / (g^T H^-1 g), which has the units of a learning rate, whatever the units of the losses. The
    step is over-relaxed by 1.5 (repeated projections converge for factors below 2):

        lambda = min(1.5 (l - tau + m) / (g^T H^-1 g), eta_safe lr)

    lambda and every coordinate of the step are capped by eta_safe lr: where the task has no gradient, v is tiny and
    g / H huge. For the same reason H is at least a thousandth of its root mean square. A gradient that is not finite is
    skipped.
    """
    cap = or_auto(constraint.eta_safe, 1.0) * learning_rate(optimizer)
    grad = violation.loss.grad()
    direction = torch._foreach_div([wide(part) for part in grad], metric(theta, optimizer))
    inner_product = inner(grad, direction).double()
    # All of this stays on the device and is read once below: a transfer per number would stall the GPU.
    chosen = _step_length(RELAXATION * violation.descent, inner_product, cap)
    scale_(direction, chosen.to(direction[0].dtype))
    whole = norm(direction).double()
    # lambda alone is no bound: where v is tiny, a coordinate of g / H is huge.
    torch._foreach_clamp_min_(direction, -cap)
    torch._foreach_clamp_max_(direction, cap)
    read = torch.stack([inner_product, chosen, whole, norm(direction).double()])
    product, step_length, whole_length, length = read.tolist()
    if not math.isfinite(product):
        return step_metrics(triggered=True, skipped=True)
    add_(theta, direction, -1.0)
    is_capped = product > 0 and (step_length >= cap or length < whole_length)
    return step_metrics(triggered=True, alpha=step_length, capped=is_capped, length=length)


def _step_length(violation: float, product: Tensor, cap: float) -> Tensor:
    """Return the step length of `halfspace_step` for a product that stays on its device."""
    step = (torch.full_like(product, violation) / product).clamp(max=cap)
    return torch.where(product > 0, step, 0.0) if violation > 0 else torch.zeros_like(product)


@torch.no_grad()
def metric(theta: Vector, optimizer: Optimizer) -> list[Tensor]:
    """Return H by parameter: the square root of Adam's bias-corrected second moment, with a floor.

    Raises `InvalidRecipe` if the optimizer keeps no second moment.
    """
    beta = optimizer.param_groups[0].get("betas", (0.0, 0.0))[1]
    second = [_second_moment(optimizer, part, beta) for part in theta]
    floor = FLOOR * (total(second) / size(theta)).sqrt()
    H = [part.sqrt().clamp(min=floor.to(part.dtype)) for part in second]
    torch._foreach_add_(H, 1e-8)
    return H


def _second_moment(optimizer: Optimizer, part: Tensor, beta: float) -> Tensor:
    state = optimizer.state[part]
    if "exp_avg_sq" not in state:
        raise InvalidRecipe("variant preconditioned needs an optimizer that keeps Adam's second moment", "variant")
    correction: Tensor = 1 - beta ** state["step"].double()
    second = wide(state["exp_avg_sq"])
    return second / correction.to(second)


class GatedOptimizer:
    """A gated optimizer: a second AdamW, for safety alone, that steps only when the constraint is violated.

        theta <- AdamW_safe(theta, g),   lr_safe = eta_safe lr,   no weight decay

    This is the idea of the authors' code with moments of its own: safety gradients do not leak into the following
    utility steps, and stale utility momentum does not leak into the safety step. The step length does not depend on the
    violation.
    """

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


def closed_form_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Correct theta as printed in Algorithm 1; the cap on alpha is in units of plain gradient descent.

    alpha = min((l - tau) / |g|^2, eta_safe), with eta_safe = lr.
    """
    return project_(theta, violation, eta_safe=or_auto(constraint.eta_safe, learning_rate(optimizer)))


def reference_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Correct theta as the authors' code does: by the task's own AdamW, along the gradient rescaled per tensor p.

        theta <- AdamW(theta, alpha_p g_p),   alpha_p = min((l - tau) / |g_p|, eta_safe),   |g| <= 1

    g is first clipped to norm 1. Each tensor p has its own alpha_p, with eta_safe = 1, a norm that is not squared, and
    1e-8 added to it. alpha_p g_p then goes through the same AdamW as the task gradient, so it enters both moments and
    decays the weights a second time. The bookkeeping errors of that code (batches counted twice, gradients left over
    for the next epoch) are not reproduced. A gradient that is not finite is skipped.
    """
    eta_safe = or_auto(constraint.eta_safe, 1.0)
    grad = violation.loss.grad()
    clip = (1.0 / (norm(grad) + 1e-6)).clamp(max=1.0)
    scale_(grad, clip)
    clipped, *lengths = torch.cat([clip[None], norms(grad)]).tolist()
    if not math.isfinite(clipped) or not clipped > 0:
        return step_metrics(triggered=True, skipped=True)
    # `excess` and not `descent`: the authors' code has no margin.
    alphas = [min(violation.excess / (norm_p + 1e-8), eta_safe) for norm_p in lengths]
    for alpha, part in zip(alphas, grad, strict=True):
        part.mul_(alpha)
    length = optimizer_step_(optimizer, theta, grad)
    # A cap shortens nothing where the gradient is zero.
    is_capped = any(lengths) and min(alphas) >= eta_safe
    return step_metrics(triggered=True, alpha=sum(alphas) / len(alphas), capped=is_capped, length=length)
