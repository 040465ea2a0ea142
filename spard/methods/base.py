"""The base class of training methods, and the optimizer step that all of them share.

`spard.training.train` calls the hooks of `Method` in the order of their definition and knows no method by name. A
method's `step` sees only the trained parameters (theta), closures for the task and safe losses, and the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from spard.config import Defense
from spard.data.batches import Batch
from spard.data.chat import EncodedSample
from spard.errors import NonFiniteLoss
from spard.losses.cross_entropy import Evaluation
from spard.losses.gradients import Gradient, Loss, Losses, ValueAndGrad, safe_losses
from spard.losses.vectors import Vector
from spard.models.base import Base

Metrics: TypeAlias = dict[str, float]
Settings = TypeVar("Settings", bound=Defense)


@dataclass(frozen=True, slots=True)
class Plan:
    """Facts about the run that a method receives before its first step.

    tau            bounds on the safe losses by name, as `Method.measure_tau` returned or a resume state kept them.
    total_steps    optimizer steps of the run; 0 if the number is unknown.
    max_grad_norm  norm that a method with `clips_gradients` clips its gradients to.
    """

    tau: Mapping[str, float]
    total_steps: int = 0
    max_grad_norm: float = math.inf


class Method(Generic[Settings]):
    """Plain fine-tuning, with the hooks that a defense overrides.

    The training loop calls them in this order: `training_rows`, `prepare`, `measure_tau` and `measure_rows` (only in a
    new run), `start`, `restore` (only after a resume), then `step` once per optimizer step, and `finish_` at the end.

        class MyMethod(Method[MySettings]):
            def step(self, theta, task, safe, optimizer):
                metrics = utility_step_(theta, task, optimizer)
                return metrics | {"loss/safe": safe()["mean"].value}
    """

    clips_gradients: ClassVar[bool] = False
    """True if the method clips gradients itself; the training loop then passes it the task gradient unclipped."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def training_rows(self, task: Sequence[EncodedSample], safe: Sequence[EncodedSample]) -> Sequence[EncodedSample]:
        """Return the rows of an epoch, the customer's (`task`) first; tokens of the rows after them are not billed."""
        return task

    def safe_batch_size(self, batch_size: int) -> int:
        """Return how many safe rows a call of `safe` draws, given the run's batch size; 0 if it draws none."""
        return 0

    def prepare(self, base: Base, *, has_lora: bool) -> None:
        """Store references to the base model; its adapters exist, but no weight has been trained."""

    def measure_tau(self, measure: Callable[[], Evaluation]) -> dict[str, float]:
        """Return the bounds on the safe losses by name, in nats per token.

        `measure` evaluates the base model on the plain safe rows. Called once per run, because the base model's loss
        cannot be measured after training began: resume states keep the result.
        """
        return {}

    def measure_rows(self, measure: Callable[[], Tensor]) -> None:
        """Store the base model's losses on each safe row; `measure` returns them as `[N, 2]` (`spard.losses.relative`).

        Called once per run, like `measure_tau`: what later steps need must be part of `state`.
        """

    def start(self, plan: Plan) -> None:
        """Initialize the method before its first step; after a resume `restore` follows."""

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned at the save; its tensors may be on another device than `theta`."""

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """Take one optimizer step, changing `theta` in place, and return its metrics by name.

        `task` returns the task loss with its gradient, `safe` the safe losses of the next safe batch. Both evaluate the
        model at the current `theta`, so a call after the utility step sees the updated parameters.
        """
        return utility_step_(theta, task, optimizer)

    def safe_losses(self, model: Any, theta: Vector, batch: Batch) -> Mapping[str, Loss]:
        """Return the safe losses by name, computed without dropout; `step` gets them when it calls `safe`.

        A rank that got none of the safe rows passes a batch without labels.
        """
        return safe_losses(model, theta, batch)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the method carries from step to step, by name, for resume states."""
        return {}

    def finish_(self, model: Any) -> None:
        """Change the trained model in place before it is saved."""


def utility_step_(theta: Vector, task: ValueAndGrad, optimizer: Optimizer) -> Metrics:
    """Take one optimizer step on the task loss, theta <- AdamW(theta, grad L_task), and return its metrics.

    Raises `NonFiniteLoss` before the step if the loss or its gradient is not finite; theta is then unchanged.
    """
    found = task()
    require_finite("task", found.loss, found.norm)
    descend_(optimizer, theta, found.grad)
    return report(found)


def descend_(optimizer: Optimizer, theta: Vector, grad: Vector) -> None:
    """Take one step of the optimizer along `grad`, then free the gradients."""
    for parameter, part in zip(theta, grad, strict=True):
        parameter.grad = part
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def require_finite(name: str, *values: float) -> None:
    """Raise `NonFiniteLoss` if a value is NaN or infinite.

    Call it before any comparison with tau: a comparison with NaN is False and the constraint looks satisfied.
    """
    if not all(math.isfinite(value) for value in values):
        raise NonFiniteLoss(f"the {name} loss or its gradient is not finite; a lower learning rate may help")


def report(found: Gradient) -> Metrics:
    """Return a task gradient's metrics: loss, token accuracy, norm before clipping, and metrics that the loss adds."""
    return {"loss/task": found.loss, "accuracy/task": found.accuracy, "grad_norm": found.norm, **found.more}
