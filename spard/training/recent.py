"""Weights of the latest epoch ends, in case the run ends early and their checkpoints are then needed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_PREFIX = "recent/"  # of names in a resume state: recent/{step}/{parameter}


class RecentWeights:
    """Trained weights at the latest `epochs` epoch ends, as they would be served, by step, in main memory.

    An epoch end whose checkpoint would not be kept is audited again if the run ends soon after it; see
    `Ends.show_again`.
    """

    def __init__(self, theta: Mapping[str, Tensor], epochs: int) -> None:
        self._theta, self._epochs = theta, epochs
        self._weights: dict[int, dict[str, Tensor]] = {}

    @property
    def steps(self) -> list[int]:
        """The steps whose weights are stored, latest first."""
        return sorted(self._weights, reverse=True)

    def add(self, step: int) -> None:
        """Store the model's current weights under `step`, unless `epochs` is 0."""
        if self._epochs < 1:
            return
        self._weights[step] = {name: part.detach().to("cpu", copy=True) for name, part in self._theta.items()}

    def forget_old(self, step: int, steps_per_epoch: int) -> None:
        """Drop the weights of all but the latest `epochs` epoch ends, of which `step` is the newest."""
        first = step - (self._epochs - 1) * steps_per_epoch  # step of the oldest epoch end to keep
        self._weights = {each: kept for each, kept in self._weights.items() if each >= first}

    def save(self, tensors: dict[str, Tensor]) -> None:
        """Add the weights to a resume state's tensors, under names that earlier versions ignore."""
        for step, kept in self._weights.items():
            tensors |= {f"{_PREFIX}{step}/{name}": part for name, part in kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the weights of a resume state."""
        self._weights = {}
        for name, part in tensors.items():
            if name.startswith(_PREFIX):
                step, _, own = name.removeprefix(_PREFIX).partition("/")
                self._weights.setdefault(int(step), {})[own] = part.to("cpu")

    @torch.no_grad()
    def put_(self, step: int) -> None:
        """Copy the weights of a step into the model."""
        for name, part in self._weights[step].items():
            self._theta[name].copy_(part)
