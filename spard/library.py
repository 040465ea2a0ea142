"""The projection for any PyTorch loop: an optimizer that wraps yours and a closure of safe losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.config import Spard
from spard.errors import InvalidRecipe
from spard.grads import Loss
from spard.methods import Stateful, constraint_of, safety_of
from spard.methods.base import Metrics, require_finite

SafeLoss = Callable[[], Tensor | Mapping[str, Tensor]]


class SafetyProjection(Optimizer):
    """Steps like the optimizer it wraps, then brings the safe loss back to tau if it rose above.

        optimizer = SafetyProjection(AdamW(model.parameters(), lr=1e-4), safe_loss)
        loss.backward()
        optimizer.step()

    `safe_loss` draws a safe batch and returns its loss with its graph, dropout off, or several losses by name; the one
    that is violated more is projected on. It is called every `check_every` steps; the anchor is the training loop's.
    With tau "auto" each tau is the mean over `calibration` calls made now, so build it before the first step and let
    these calls go once through the safe set. `metrics` tells of the last step, and is empty where it was not called.
    The state dict holds tau and moments too. One process and full-precision parameters: with several processes, or
    parameters in 16 bits that a small step cannot move, use the training loop of this package.
    """

    def __init__(
        self, optimizer: Optimizer, safe_loss: SafeLoss, defense: Spard | None = None, calibration: int = 16
    ) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise InvalidRecipe("SafetyProjection works in one process; safe losses are not averaged over ranks")
        self.optimizer, self.safe_loss, self.defense = optimizer, safe_loss, defense or Spard()
        self.safety = safety_of(self.defense)
        self.tau = self._measure_tau(calibration)
        self.metrics: Metrics = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The utility step of the wrapped optimizer, then the safety half of the variant."""
        loss = self.optimizer.step(closure)
        constraint = constraint_of(self.defense, self.tau)
        with torch.enable_grad():
            self.metrics = self.safety(self.theta, self._losses, self.optimizer, constraint)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and ours under "spard"."""
        own = {"tau": dict(self.tau), "moments": self.safety.state() if isinstance(self.safety, Stateful) else {}}
        return {**self.optimizer.state_dict(), "spard": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict)
        own = state.pop("spard")
        self.optimizer.load_state_dict(state)
        self.tau = dict(own["tau"])
        if isinstance(self.safety, Stateful):
            self.safety.restore(self.theta, own["moments"])

    @property
    def theta(self) -> list[Tensor]:
        """Everything that is trained."""
        return [part for group in self.optimizer.param_groups for part in group["params"] if part.requires_grad]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def _losses(self) -> dict[str, Loss]:
        theta, found = self.theta, self.safe_loss()
        named = {"mean": found} if isinstance(found, Tensor) else found
        return {name: Loss(float(loss.detach()), loss, theta) for name, loss in named.items()}

    def _measure_tau(self, calls: int) -> dict[str, float]:
        with torch.no_grad():
            drawn = [self._losses() for _ in range(calls if self.defense.tau == "auto" else 1)]
        tau = {name: fmean(losses[name].value for losses in drawn) for name in drawn[0]}
        require_finite("safe", *tau.values())
        return tau if self.defense.tau == "auto" else dict.fromkeys(tau, self.defense.tau)
