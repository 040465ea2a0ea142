r"""SPAG, the optimizer of SPARD (Chen et al., ICML 2026, Algorithm 1).

    theta+ = AdamW(theta, grad L_task);   theta = theta+ - alpha g,   g = grad L_safe(theta+),   if L_safe(theta+) > tau

Two safe losses l may be bounded, each by its own tau: the token mean and the mean over each answer's first tokens.
The one that is violated more is projected on. With `bound = "excess"` l is how far each row's loss has risen above the
base model's own (`spard.losses.excess`) in place of the loss, and nothing else changes. All variants run the safety
forward without dropout and go backward only when the constraint is violated; they differ in how they correct theta, a
file each in `spard.methods.variants`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.config import Spard
from spard.data.batches import Batch
from spard.losses.cross_entropy import Evaluation
from spard.losses.excess import tolerance
from spard.losses.gradients import Loss, Losses, ValueAndGrad, safe_excess
from spard.losses.vectors import Vector
from spard.methods.base import Method, Metrics, Plan, utility_step_
from spard.methods.constraint import Constraint, Correction, StatefulCorrection, most_violated, step_metrics, values

_CLOCK = "clock"
_BASE = "base_losses"
_BOUNDED = {"loss": {"mean": "mean", "prefix": "prefix"}, "excess": {"mean": "excess", "prefix": "excess_prefix"}}


class Spag(Method[Spard]):
    """The utility step, then the safety half."""

    base_N2: Tensor | None = None
    """The base model's mean and prefix loss on what each safe row is compared with; None where losses are bounded."""

    def safe_batch_size(self, batch_size: int) -> int:
        """As asked, whatever the batch size of the run."""
        return self.settings.safe_batch_size

    def measure_tau(self, measure: Callable[[], Evaluation]) -> dict[str, float]:
        """Return tau as asked, or the base model's own losses on the plain safe rows."""
        return base_tau(self.settings, measure)

    def measure_rows(self, measure: Callable[[], Tensor]) -> None:
        """Keep the base model's losses on each safe row, where their excess is bounded."""
        if self.settings.bound == "excess":
            self.base_N2 = measure()

    def safe_losses(self, model: Any, theta: Vector, batch: Batch) -> Mapping[str, Loss]:
        """Return the token mean and the prefix mean, and where it is bounded the excess of both."""
        if self.base_N2 is None:
            return super().safe_losses(model, theta, batch)
        return safe_excess(model, theta, batch, self.base_N2)

    def start(self, plan: Plan) -> None:
        """Fix the bounds, and begin to count steps."""
        self.constraint = make_constraint(self.settings, plan.tau)
        self.safety = safety_half(self.settings, plan.total_steps)

    def step(self, theta: Vector, task: ValueAndGrad, safe: Losses, optimizer: Optimizer) -> Metrics:
        """One iteration of Algorithm 1."""
        # Utility:  theta <- AdamW(theta, grad L_task)
        metrics = utility_step_(theta, task, optimizer)

        # Safety:   theta <- theta - alpha g   if L_safe(theta) > tau
        return metrics | self.safety(theta, safe, optimizer, self.constraint)

    def state(self) -> dict[str, Tensor]:
        """Return the state of the safety step, and what the safe rows are compared with."""
        return self.safety.state() | ({} if self.base_N2 is None else {_BASE: self.base_N2})

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Continue with both."""
        base_N2 = state.get(_BASE)
        self.base_N2 = None if base_N2 is None else base_N2.to(theta[0].device)
        self.safety.restore(theta, {name: part for name, part in state.items() if name != _BASE})


class SafetyHalf:
    """The safety half of a step: look at the safe losses, and correct theta for the one that is violated most.

    It looks at every `every`-th step and after the last of `total_steps` (0: nobody knows which is the last), so that
    what was broken since is mended; a step without a look reports nothing.
    """

    def __init__(self, correct_: Correction, every: int = 1, total_steps: int = 0) -> None:
        self.correct_, self.every, self.total_steps = correct_, every, total_steps
        self.clock = 0

    def __call__(self, theta: Vector, safe: Losses, optimizer: Optimizer, constraint: Constraint) -> Metrics:
        """Mend `theta` in place and return the `spag/` metrics; raise NonFiniteLoss if a safe loss is not finite."""
        self.clock += 1
        if self.clock % self.every and self.clock != self.total_steps:
            return {}
        losses = safe()
        violation = most_violated(losses, constraint)
        return values(losses) | (
            self.correct_(theta, violation, optimizer, constraint) if violation else step_metrics()
        )

    def state(self) -> dict[str, Tensor]:
        """Return the counter of steps, where it matters, and what the correction remembers."""
        clock = {_CLOCK: torch.tensor(self.clock)} if self.every > 1 else {}
        return clock | (self.correct_.state() if isinstance(self.correct_, StatefulCorrection) else {})

    def restore(self, theta: Vector, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        if _CLOCK in state:
            self.clock = int(state[_CLOCK])
        if isinstance(self.correct_, StatefulCorrection):
            self.correct_.restore(theta, {name: part for name, part in state.items() if name != _CLOCK})


def safety_half(defense: Spard, total_steps: int = 0) -> SafetyHalf:
    """Return the safety step with the variant's correction, new for each run."""
    variant = importlib.import_module(f"spard.methods.variants.{defense.variant}")
    return SafetyHalf(variant.correction(), defense.every, total_steps)


def make_constraint(defense: Spard, tau: Mapping[str, float]) -> Constraint:
    """Return the constraint that a recipe sets: tau, and how strictly it is held."""
    return Constraint(tau, defense.delta, defense.eta_safe, defense.margin, defense.every)


def base_tau(defense: Spard, measure: Callable[[], Evaluation]) -> dict[str, float]:
    """Return tau for each constrained loss: as asked, or the base model's own on the plain safe rows.

    Where the excess is bounded "auto" needs no measurement, for the base model's own is 0.
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
