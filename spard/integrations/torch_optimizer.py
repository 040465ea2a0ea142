"""SPARD for any PyTorch loop: an optimizer that wraps yours, with safe rows or a closure of safe losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spard.config import Spard
from spard.errors import InvalidRecipe
from spard.integrations.safe_rows import SafeRows
from spard.losses.gradients import Loss
from spard.methods.base import Metrics, require_finite
from spard.methods.spag import make_constraint, safety_half

SafeLoss = Callable[[], Tensor | Mapping[str, Tensor]]


class SafetyProjection(Optimizer):
    """Step like the wrapped optimizer, then project the parameters back if the safe loss exceeds tau.

        optimizer = SafetyProjection(AdamW(model.parameters(), lr=1e-4), SafeRows(model, tokenizer, safe, rows))
        loss.backward()
        optimizer.step()

    `SafeRows` has the full defense of a language model: safe rows and variants, bounds on their losses, and the anchor,
    whose gradient is added to the loss's before each step. A closure instead must draw a safe batch and return its loss
    with its graph, dropout off, or several losses by name; it gets the projection alone. Every `check_every` steps the
    projection acts on the loss with the larger violation. With tau "auto" and a closure, each tau is the mean of
    `calibration` calls made in the constructor, so create this object before the first step, and let these calls cover
    the safe set once.

    `metrics` describe the last step and are empty if the safe losses were not measured. Parameter groups, state and
    defaults are those of the wrapped optimizer; hooks registered here run around the whole step. The state dict
    includes tau and moments.

    Raises `InvalidRecipe` with several processes. Parameters in 16 bits may absorb small steps without moving: use the
    training loop of this package in both cases.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        safe_loss: SafeLoss | SafeRows,
        defense: Spard | None = None,
        calibration: int = 16,
    ) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise InvalidRecipe("SafetyProjection works in one process; safe losses are not averaged over ranks")
        self.optimizer = copy.copy(optimizer)  # Optimizer.__init__ resets state and groups
        super().__init__([{**group} for group in optimizer.param_groups], optimizer.defaults)
        self.optimizer, self.safe_loss = optimizer, safe_loss
        self.rows = safe_loss if isinstance(safe_loss, SafeRows) else None
        self.defense = _defense(self.rows, defense)
        self.safety = safety_half(self.defense)
        # Before the first step, while the model's losses are still those of the base model.
        self.tau = self._measure_tau(calibration)
        self.metrics: Metrics = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the wrapped optimizer's step, then the safety step; return the closure's loss."""
        loss = self.optimizer.step(self._add_anchor(closure))
        constraint = make_constraint(self.defense, self.tau)
        with torch.enable_grad(), self.rows.without_dropout() if self.rows else nullcontext():
            self.metrics = self.safety(self.theta, self._losses, self.optimizer, constraint)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the wrapped optimizer's parameters."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer; later safety steps move them too."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with ours under "spard"."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        own: dict[str, Any] = {"tau": dict(self.tau), "moments": self.safety.state()}
        if self.rows:
            own |= {"rows": self.rows.tensors(), "place": self.rows.place()}
        state: dict[str, Any] = {**self.optimizer.state_dict(), "spard": own}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state = post_hook(self, state) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, with its tau."""
        state = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = pre_hook(self, state) or state
        own = state.pop("spard")
        self.optimizer.load_state_dict(state)
        self.tau = dict(own["tau"])
        self.safety.restore(self.theta, own["moments"])
        if self.rows:
            self.rows.restore(own["rows"], own["place"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which has a wrapped optimizer of its own."""
        return self.__dict__.copy()

    @property
    def theta(self) -> list[Tensor]:
        """All trained parameters."""
        return [part for group in self.optimizer.param_groups for part in group["params"] if part.requires_grad]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, which lets learning rate schedulers work on either optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter; the safety step's moments are only in `state_dict`."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's default settings for new groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def _add_anchor(self, closure: Callable[[], float] | None) -> Callable[[], float] | None:
        """Add the anchor's gradient to the existing one, or wrap the closure to add it after each evaluation."""
        rows = self.rows
        if rows is None:
            return closure
        if closure is None:
            rows.add_anchor_(self.theta)
            return None

        def evaluate() -> float:
            loss = closure()
            rows.add_anchor_(self.theta)
            return loss

        return evaluate

    def _losses(self) -> dict[str, Loss]:
        if isinstance(self.safe_loss, SafeRows):
            return self.safe_loss.losses(self.theta)
        theta, found = self.theta, self.safe_loss()
        named = {"mean": found} if isinstance(found, Tensor) else found
        return {name: Loss(float(loss.detach()), loss, theta) for name, loss in named.items()}

    def _measure_tau(self, calls: int) -> dict[str, float]:
        if self.rows:
            return self.rows.tau()
        with torch.no_grad():
            drawn = [self._losses() for _ in range(calls if self.defense.tau == "auto" else 1)]
        tau = {name: fmean(losses[name].value for losses in drawn) for name in drawn[0]}
        require_finite("safe", *tau.values())
        return tau if self.defense.tau == "auto" else dict.fromkeys(tau, self.defense.tau)


def _defense(rows: SafeRows | None, asked: Spard | None) -> Spard:
    """Return the settings of the safe rows, or the settings given with a closure; raise `InvalidRecipe` for both."""
    if rows and asked:
        raise InvalidRecipe("the settings of a SafetyProjection on SafeRows are those of the rows; give them there")
    defense = rows.defense if rows else asked or Spard()
    if rows is None and defense.bound == "excess":
        raise InvalidRecipe("a closure does not say which rows its loss is of; the excess needs SafeRows", "bound")
    return defense
