"""What a training method is, and the steps that all of them are made of.

A step sees theta, the utility loss, the safe losses and an optimizer. The training loop calls the hooks of `Method`
in the order in which they stand there, and knows no method by name.
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
from spard.data.chat import Encoded
from spard.errors import NonFiniteLoss
from spard.losses.cross_entropy import Evaluation
from spard.losses.gradients import Gradient, Loss, Losses, ValueAndGrad, safe_losses
from spard.losses.vectors import Vector
from spard.models.base import Base

Metrics: TypeAlias = dict[str, float]
Settings = TypeVar("Settings", bound=Defense)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known when the first step begins.

    tau            what `Method.measure_tau` found, or what the checkpoint kept of it.
    total_steps    of the run; 0 if nobody knows.
    max_grad_norm  for methods that clip themselves.
    """

    tau: Mapping[str, float]
    total_steps: int = 0
    max_grad_norm: float = math.inf


class Method(Generic[Settings]):
    """Plain fine-tuning, and the hooks by which a defense makes something else of it."""

    clips_gradients: ClassVar[bool] = False
    """Whether the method clips what it descends along; the task gradient then reaches it as it is."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def training_rows(self, task: Sequence[Encoded], safe: Sequence[Encoded]) -> Sequence[Encoded]:
        """Return the rows of an epoch; those after the customer's own are not billed."""
        return task

    def safe_batch_size(self, batch_size: int) -> int:
        """How many safe rows `safe` draws at each call, in a run of this batch size."""
        return 0

    def prepare(self, base: Base, *, has_lora: bool) -> None:
        """Keep what is compared with later; `base.model` has not been trained yet, its adapters are in place."""

    def measure_tau(self, measure: Callable[[], Evaluation]) -> dict[str, float]:
        """Bounds on safe losses; `measure` evaluates the base model on the plain safe rows.

        Called once in a run: checkpoints keep the result.
        """
        return {}

    def measure_rows(self, measure: Callable[[], Tensor]) -> None:
        """Keep what the base model's losses are on each safe row; `measure` takes them (`spard.losses.excess`), N x 2.

        Called once in a run, as `measure_tau` is: what is needed later belongs into `state`.
        """

    def start(self, plan: Plan) -> None:
        """Begin, before the first step or before `restore`."""

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """One iteration on `theta`, in place; `task` and `safe` evaluate at `theta` as it is when they are called."""
        return utility_step_(theta, task, optimizer)

    def safe_losses(self, model: Any, theta: Vector, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses that `safe` gives to `step`, without dropout; without rows a batch has no labels."""
        return safe_losses(model, theta, batch)

    def state(self) -> dict[str, Tensor]:
        """Return what the method remembers between steps, for checkpoints."""
        return {}

    def finish_(self, model: Any) -> None:
        """Change the trained model in place before it is saved."""


def utility_step_(theta: Vector, task: ValueAndGrad, optimizer: Optimizer) -> Metrics:
    """Step: theta <- AdamW(theta, grad L_task)."""
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
    """Return the metrics of a task gradient."""
    return {"loss/task": found.loss, "accuracy/task": found.accuracy, "grad_norm": found.norm, **found.more}
