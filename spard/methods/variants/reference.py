r"""The step of the authors' code: gated AdamW on safety gradients that are rescaled tensor by tensor.

g is first clipped to norm 1. Each tensor p has its own alpha_p = min((l - tau) / (|g_p| + 1e-8), eta_safe) with
eta_safe = 1 and a norm that is not squared. alpha_p g_p then goes through the same AdamW as the task gradient, so it
enters both moments and decays the weights a second time. The bookkeeping errors of that code (batches counted twice,
gradients left over for the next epoch) are not reproduced.
"""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from spard.losses.vectors import Vector, norm, norms, scale_
from spard.methods.base import Metrics
from spard.methods.constraint import Constraint, Correction, Violation, optimizer_step_, or_auto, step_metrics


def correction() -> Correction:
    """Return the correction; it has no state, so all runs share the function."""
    return reference_


def reference_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Correct theta by the task's own AdamW, along the safety gradient rescaled per tensor p.

        theta <- AdamW(theta, alpha_p g_p),   alpha_p = min((l - tau) / |g_p|, eta_safe),   |g| <= 1

    A gradient that is not finite is skipped.
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
