"""What every method sees: theta, the utility loss, the safe losses and an optimizer; never a model or a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from spard.errors import NonFiniteLoss
from spard.grads import Gradient, Losses, ValueAndGrad
from spard.vectors import Vector

Metrics: TypeAlias = dict[str, float]


class Step(Protocol):
    """One iteration on `theta`, in place; `task` and `safe` evaluate at `theta` as it is when they are called."""

    def __call__(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics: ...


@runtime_checkable
class Stateful(Protocol):
    """A step that remembers; what `state` gives goes into every checkpoint, and `restore` goes on from it."""

    def state(self) -> dict[str, Tensor]: ...

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None: ...


def utility_step_(theta: Vector, task: ValueAndGrad, optimizer: Optimizer) -> Metrics:
    """theta <- AdamW(theta, grad L_task)."""
    found = task()
    require_finite("task", found.loss, found.norm)
    descend_(optimizer, theta, found.grad)
    return report(found)


def descend_(optimizer: Optimizer, theta: Vector, grad: Vector) -> None:
    """One step of the optimizer along `grad`."""
    for parameter, part in zip(theta, grad, strict=True):
        parameter.grad = part
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def require_finite(name: str, *values: float) -> None:
    """Guard every comparison that follows: NaN is neither above nor below tau."""
    if not all(math.isfinite(value) for value in values):
        raise NonFiniteLoss(f"the {name} loss or its gradient is not finite; a lower learning rate may help")


def report(found: Gradient) -> Metrics:
    """What a task gradient says of itself."""
    return {"loss/task": found.loss, "accuracy/task": found.accuracy, "grad_norm": found.norm}
