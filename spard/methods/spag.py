r"""SPAG, the optimizer of SPARD (Chen et al., ICML 2026, Algorithm 1).

    theta+ = AdamW(theta, grad L_task);   theta = theta+ - alpha g,   g = grad L_safe(theta+),   if L_safe(theta+) > tau

Up to two safe losses l are bounded, each by its own tau: the mean over answer tokens and the mean over each answer's
first tokens. The correction follows the gradient of the one that exceeds its tau most. With `bound = "excess"`, l is
the rise of each row's loss above the base model's own (`spard.losses.relative`); nothing else changes. All variants
run the safety forward pass without dropout and the backward pass only after a violation. They differ in how they
correct theta (`spard.methods.constraint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.config import Spard
from spard.data.batches import Batch
from spard.losses.cross_entropy import Evaluation
from spard.losses.gradients import Loss, Losses, ValueAndGrad, safe_excess
from spard.losses.relative import tolerance
from spard.losses.vectors import Vector
from spard.methods.base import Method, Metrics, Plan, utility_step_
from spard.methods.constraint import (
    Constraint,
    Correction,
    StatefulCorrection,
    most_violated,
    open_correction,
    step_metrics,
    values,
)

_CLOCK = "clock"
_BASE = "base_losses"
_BOUNDED = {"loss": {"mean": "mean", "prefix": "prefix"}, "excess": {"mean": "excess", "prefix": "excess_prefix"}}


class Spag(Method[Spard]):
    """The utility step, followed by the safety half."""

    base_N2: Tensor | None = None
    """The base model's mean and prefix loss on each safe row, `[N, 2]`; None unless their excess is bounded."""

    def safe_batch_size(self, batch_size: int) -> int:
        """Return the setting `safe_batch_size`; it does not depend on the run's batch size."""
        return self.settings.safe_batch_size

    def measure_tau(self, measure: Callable[[], Evaluation]) -> dict[str, float]:
        """Return tau by loss name: the setting, or the base model's own losses on the plain safe rows."""
        return base_tau(self.settings, measure)

    def measure_rows(self, measure: Callable[[], Tensor]) -> None:
        """Store the base model's losses on each safe row if the setting bounds their excess."""
        if self.settings.bound == "excess":
            self.base_N2 = measure()

    def safe_losses(self, model: Any, theta: Vector, batch: Batch) -> Mapping[str, Loss]:
        """Return the token mean and the prefix mean, and the excess of both if the setting bounds it."""
        if self.base_N2 is None:
            return super().safe_losses(model, theta, batch)
        return safe_excess(model, theta, batch, self.base_N2)

    def start(self, plan: Plan) -> None:
        """Set up the constraint and the safety half with its step counter."""
        self.constraint = make_constraint(self.settings, plan.tau)
        self.safety = safety_half(self.settings, plan.total_steps)

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """Take one step of Algorithm 1: the utility step, then the correction if the constraint is violated."""
        # Utility:  theta <- AdamW(theta, grad L_task)
        metrics = utility_step_(theta, task, optimizer)

        # Safety:   theta <- theta - alpha g   if L_safe(theta) > tau
        return metrics | self.safety(theta, safe, optimizer, self.constraint)

    def state(self) -> dict[str, Tensor]:
        """Return the state of the safety half, and the base model's losses on the safe rows if they are bounded."""
        return self.safety.state() | ({} if self.base_N2 is None else {_BASE: self.base_N2})

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Restore the safety half and the base model's losses on the safe rows."""
        base_N2 = state.get(_BASE)
        self.base_N2 = None if base_N2 is None else base_N2.to(theta[0].device)
        self.safety.restore(theta, {name: part for name, part in state.items() if name != _BASE})


class SafetyHalf:
    """The safety half of a step: evaluate the safe losses, and correct theta for the most violated one.

    It evaluates them at every `every`-th step and after the last of `total_steps` (0: the number is unknown), so that a
    violation since the previous evaluation does not reach the finished model. Other steps return no metrics.
    """

    def __init__(self, correct_: Correction, every: int = 1, total_steps: int = 0) -> None:
        self.correct_, self.every, self.total_steps = correct_, every, total_steps
        self.clock = 0

    def __call__(self, theta: Vector, safe: Losses, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        """Correct `theta` in place if a constraint is violated; return the safe losses and the `spag/` metrics.

        Raises `NonFiniteLoss` if a safe loss is not finite.
        """
        self.clock += 1
        if self.clock % self.every and self.clock != self.total_steps:
            return {}
        losses = safe()
        violation = most_violated(losses, constraint)
        return values(losses) | (
            self.correct_(theta, violation, optimizer, constraint) if violation else step_metrics()
        )

    def state(self) -> dict[str, Tensor]:
        """Return the step counter, if evaluations skip steps, and the correction's own state."""
        # With every = 1 no step is skipped, and the count decides nothing.
        clock = {_CLOCK: torch.tensor(self.clock)} if self.every > 1 else {}
        return clock | (self.correct_.state() if isinstance(self.correct_, StatefulCorrection) else {})

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if _CLOCK in state:
            self.clock = int(state[_CLOCK])
        if isinstance(self.correct_, StatefulCorrection):
            self.correct_.restore(theta, {name: part for name, part in state.items() if name != _CLOCK})


def safety_half(defense: Spard, total_steps: int = 0) -> SafetyHalf:
    """Return a new safety half with the correction of the defense's variant; one per run, since it may hold moments."""
    return SafetyHalf(open_correction(defense.variant), defense.every, total_steps)


def make_constraint(defense: Spard, tau: Mapping[str, float]) -> Constraint:
    """Return the constraint of a recipe's defense, with the bounds `tau` by loss name."""
    return Constraint(tau, defense.delta, defense.eta_safe, defense.margin, defense.every)


def base_tau(defense: Spard, measure: Callable[[], Evaluation]) -> dict[str, float]:
    """Return tau by the name of each constrained loss, in nats per token: the setting, or the base model's own losses.

    "auto" calls `measure`, an evaluation of the base model on the plain safe rows. For a bounded excess it does not:
    the base model's excess is 0, so tau is the tolerance of `spard.losses.relative` instead.
    """
    kinds = ("mean", "prefix") if defense.constraint == "both" else (defense.constraint,)
    names = [_BOUNDED[defense.bound][kind] for kind in kinds]
    if defense.tau != "auto":
        return dict.fromkeys(names, defense.tau)
    if defense.bound == "excess":
        return dict.fromkeys(names, tolerance(defense.safe_batch_size))
    found = measure()
    own = {"mean": found.loss, "prefix": found.prefix_loss}
    return {name: own[name] for name in names}
