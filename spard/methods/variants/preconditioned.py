r"""SPAG in Adam's metric: project to the nearest safe point, with distances scaled by Adam's second moment.

    min 1/2 |theta - theta+|_H^2   s.t.   l + g.(theta - theta+) <= tau - m,   H = diag(sqrt(v))

where v is the utility optimizer's second moment. The solution is theta = theta+ - lambda g / H with
lambda = (l - tau + m) / (g^T H^-1 g), which has the units of a learning rate, whatever the units of the losses. The
step is over-relaxed by 1.5 (repeated projections converge for factors below 2). lambda and every coordinate of the
step are capped by eta_safe lr: where the task has no gradient, v is tiny and g / H huge. For the same reason H is at
least a thousandth of its root mean square.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.errors import InvalidRecipe
from spard.losses.vectors import Vector, add_, inner, norm, scale_, size, total, wide
from spard.methods.base import Metrics
from spard.methods.constraint import (
    Constraint,
    Correction,
    Violation,
    learning_rate,
    or_auto,
    step_metrics,
)

RELAXATION = 1.5
FLOOR = 1e-3


def correction() -> Correction:
    """Return the correction; it has no state, so all runs share the function."""
    return precondition_


def precondition_(theta: Vector, violation: Violation, optimizer: Optimizer, constraint: Constraint) -> Metrics:
    """Correct theta in place: theta <- theta - lambda g / H, with every coordinate of the step capped.

        lambda = min(1.5 (l - tau + m) / (g^T H^-1 g), eta_safe lr)

    A gradient that is not finite is skipped.
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
