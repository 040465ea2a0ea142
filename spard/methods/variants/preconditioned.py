r"""SPAG in the metric of Adam: the nearest safe point where a coordinate's distance is what Adam thinks it is.

    min 1/2 |theta - theta+|_H^2   s.t.   l + g.(theta - theta+) <= tau - m,   H = diag(sqrt(v))

with v the utility optimizer's second moment has the solution theta = theta+ - lambda g / H with
lambda = (l - tau + m) / (g^T H^-1 g), which has the units of a learning rate, whatever those of the losses. The step
is over-relaxed by 1.5 (below 2 repeated projections still converge), lambda is capped by eta_safe lr and so is every
coordinate of the step: where the task has no gradient v is tiny. For the same reason H is at least a thousandth of
its root mean square.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.errors import InvalidRecipe
from spard.losses.vectors import Vector, add_, dot, norm, size, total, wide
from spard.methods.base import Metrics
from spard.methods.constraint import (
    Constraint,
    Correction,
    Violation,
    halfspace_step,
    learning_rate,
    moved,
    or_auto,
)

RELAXATION = 1.5
FLOOR = 1e-3


def correction() -> Correction:
    """Return the same function for every run."""
    return preconditioned_


def preconditioned_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Step: theta <- theta - lambda g / H,   lambda = min(1.5 (l - tau + m) / (g^T H^-1 g), eta_safe lr)."""
    cap = or_auto(constraint.eta_safe, 1.0) * learning_rate(optimizer)
    grad = violation.loss.grad()
    direction = torch._foreach_div([wide(part) for part in grad], metric(theta, optimizer))
    product = dot(grad, direction)
    if not math.isfinite(product):
        return moved(triggered=True, skipped=True)
    step_length = halfspace_step(RELAXATION * violation.descent, product, cap)
    torch._foreach_mul_(direction, step_length)
    torch._foreach_clamp_min_(direction, -cap)
    torch._foreach_clamp_max_(direction, cap)
    add_(theta, direction, -1.0)
    return moved(triggered=True, alpha=step_length, capped=step_length >= cap, length=float(norm(direction)))


@torch.no_grad()
def metric(theta: Vector, optimizer: Optimizer) -> list[Tensor]:
    """H: the square root of Adam's second moment, bias corrected, floored."""
    beta = optimizer.param_groups[0].get("betas", (0.0, 0.0))[1]
    second = [_second_moment(optimizer, part, beta) for part in theta]
    root_mean_square = math.sqrt(total(second) / size(theta))
    H = list(torch._foreach_sqrt(second))
    torch._foreach_clamp_min_(H, FLOOR * root_mean_square)
    torch._foreach_add_(H, 1e-8)
    return H


def _second_moment(optimizer: Optimizer, part: Tensor, beta: float) -> Tensor:
    state = optimizer.state[part]
    if "exp_avg_sq" not in state:
        raise InvalidRecipe("variant preconditioned needs an optimizer that keeps Adam's second moment", "variant")
    corrected: Tensor = wide(state["exp_avg_sq"]) / (1 - beta ** float(state["step"]))
    return corrected
