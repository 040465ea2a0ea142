r"""SPAG, the optimiser of SPARD (Chen et al., ICML 2026, Algorithm 1), in three variants.

    theta+ = AdamW(theta, grad L_task);   theta = theta+ - alpha g,   g = grad L_safe(theta+),   if L_safe(theta+) > tau

Two safe losses l may be bounded, each by its own tau: the token mean and the mean over each answer's first tokens.
The one that is violated more is projected on. All variants run the safety forward without dropout and go backward
only when the constraint is violated.

trust_region   alpha = min((l - tau) / |g|^2, R / |g|) with R = eta_safe lr sqrt(N) for N parameters. The paper caps
               alpha by the learning rate, which is a length in units of plain gradient descent and, under AdamW, far
               too short to matter; R is about the length of one AdamW step. Applied to theta, past the optimizer.
closed_form    the paper: alpha = min((l - tau) / |g|^2, eta_safe), eta_safe = lr.
reference      the authors' code: g is first clipped to norm 1; every tensor p has its own
               alpha_p = min((l - tau) / (|g_p| + 1e-8), eta_safe), eta_safe = 1, with the norm not squared; and
               alpha_p g_p goes through the same AdamW, so it enters both moments and decays the weights once more.
               Its bookkeeping errors (batches counted twice, gradients left over for the next epoch) are not kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from spard.config import Auto
from spard.grads import Loss, Losses, ValueAndGrad
from spard.methods.base import Metrics, descend_, require_finite, utility_step_
from spard.projections import halfspace_step
from spard.vectors import Vector, add_, dot, norm, scale_, size

METRIC = {"mean": "loss/safe", "prefix": "loss/safe_prefix"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Keep each loss named in `tau` at or below its tau; ignore violations up to delta."""

    tau: Mapping[str, float]
    delta: float = 0.0
    eta_safe: float | Auto = "auto"


@dataclass(frozen=True, slots=True)
class Violation:
    """The safe loss that exceeds its tau most, and by how much."""

    loss: Loss
    excess: float


def trust_region_step(
    theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer, constraint: Constraint
) -> Metrics:
    """Algorithm 1 with a step no longer than the utility optimizer's own."""
    # Utility:  theta <- AdamW(theta, grad L_task)
    metrics = utility_step_(theta, task, optimizer)

    # Safety:   theta <- theta - alpha g,   alpha = min((l - tau) / |g|^2, R / |g|)
    losses = safe()
    violation = most_violated(losses, constraint)
    radius = _or_auto(constraint.eta_safe, 1.0) * learning_rate(optimizer) * math.sqrt(size(theta))
    moved = _project_(theta, violation, radius=radius) if violation else _moved()
    return metrics | _values(losses) | moved


def closed_form_step(
    theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer, constraint: Constraint
) -> Metrics:
    """Algorithm 1 as printed: alpha is capped by eta_safe, in units of plain gradient descent."""
    # Utility:  theta <- AdamW(theta, grad L_task)
    metrics = utility_step_(theta, task, optimizer)

    # Safety:   theta <- theta - alpha g,   alpha = min((l - tau) / |g|^2, eta_safe)
    losses = safe()
    violation = most_violated(losses, constraint)
    eta_safe = _or_auto(constraint.eta_safe, learning_rate(optimizer))
    moved = _project_(theta, violation, eta_safe=eta_safe) if violation else _moved()
    return metrics | _values(losses) | moved


def reference_step(
    theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer, constraint: Constraint
) -> Metrics:
    """The step of the authors' code: gated AdamW on safety gradients rescaled tensor by tensor."""
    # Utility:  theta <- AdamW(theta, grad L_task)
    metrics = utility_step_(theta, task, optimizer)

    # Safety:   theta <- AdamW(theta, alpha_p g_p),   alpha_p = min((l - tau) / |g_p|, eta_safe),   |g| <= 1
    losses = safe()
    violation = most_violated(losses, constraint)
    eta_safe = _or_auto(constraint.eta_safe, 1.0)
    moved = _descend_rescaled_(theta, violation, optimizer, eta_safe) if violation else _moved()
    return metrics | _values(losses) | moved


def most_violated(losses: Mapping[str, Loss], constraint: Constraint) -> Violation | None:
    """The constrained loss with the largest l - tau, if that exceeds delta."""
    require_finite("safe", *(loss.value for loss in losses.values()))
    excess = {name: losses[name].value - tau for name, tau in constraint.tau.items()}
    worst = max(excess, key=excess.__getitem__)
    return Violation(losses[worst], excess[worst]) if excess[worst] > constraint.delta else None


def learning_rate(optimizer: Optimizer) -> float:
    """lr_t, the rate of the utility step just taken."""
    return float(optimizer.param_groups[0]["lr"])


def _project_(theta: Vector, violation: Violation, *, radius: float = math.inf, eta_safe: float = math.inf) -> Metrics:
    """theta <- theta - alpha g; a gradient that is not finite leaves the utility step as it is, and is counted."""
    grad = violation.loss.grad()
    sq_norm = dot(grad, grad)
    if not math.isfinite(sq_norm):
        return _moved(triggered=True, skipped=True)
    max_step = min(eta_safe, radius / math.sqrt(sq_norm)) if sq_norm else 0.0
    alpha = halfspace_step(violation.excess, sq_norm, max_step)
    add_(theta, grad, -alpha)
    return _moved(triggered=True, alpha=alpha, capped=alpha >= max_step, length=alpha * math.sqrt(sq_norm))


def _descend_rescaled_(theta: Vector, violation: Violation, optimizer: Optimizer, eta_safe: float) -> Metrics:
    grad = violation.loss.grad()
    clip = (1.0 / (norm(grad) + 1e-6)).clamp(max=1.0)
    if not clip.isfinite() or not clip > 0:
        return _moved(triggered=True, skipped=True)
    scale_(grad, clip)
    norms = torch.stack(torch._foreach_norm(list(grad))).tolist()
    alphas = [min(violation.excess / (norm_p + 1e-8), eta_safe) for norm_p in norms]
    descend_(optimizer, theta, [alpha * part for alpha, part in zip(alphas, grad, strict=True)])
    return _moved(triggered=True, alpha=sum(alphas) / len(alphas), capped=min(alphas) >= eta_safe)


def _or_auto(eta_safe: float | Auto, auto: float) -> float:
    return auto if eta_safe == "auto" else eta_safe


def _values(losses: Mapping[str, Loss]) -> Metrics:
    return {METRIC[name]: loss.value for name, loss in losses.items()}


def _moved(
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
