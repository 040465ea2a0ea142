"""The best end of an epoch so far: its weights as they would be served, and whether it still pays to go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from spard.config import Ending

_WEIGHTS, _STANDINGS = "best/", "standings"  # of a resume state


@dataclass(frozen=True, slots=True)
class Standing:
    """What the end of an epoch was measured as, to be compared with others.

    within    whether the gate would be content with the figures of the development shares; None: there are none
    attacked  the share of their attacks that succeed; None likewise
    loss      on the validation rows
    """

    epoch: int
    step: int
    within: bool | None
    attacked: float | None
    loss: float

    @property
    def rank(self) -> tuple[bool, float, float]:
        """The lower the better: safety within the gate's bounds first, and the loss only among equals."""
        attacked = 0.0 if self.within else self.attacked or 0.0
        return not self.within, attacked, math.inf if math.isnan(self.loss) else self.loss


@dataclass(frozen=True, slots=True)
class Ended:
    """Which end of an epoch a run ended with, after which ones, of how many that were planned."""

    released: Standing
    standings: tuple[Standing, ...]
    planned_epochs: int


class Best:
    """The standings of all ends of epochs, and the weights of the best of them where these are to be kept."""

    def __init__(self, ending: Ending, theta: Mapping[str, Tensor]) -> None:
        self.ending, self.theta = ending, theta
        self.standings: list[Standing] = []
        self.weights: dict[str, Tensor] = {}

    @property
    def best(self) -> Standing:
        """The best so far; of equals the earliest."""
        return min(self.standings, key=lambda each: each.rank)

    @property
    def released_standing(self) -> Standing:
        """The one whose weights the run ends with."""
        return self.best if self.ending.keep == "best" else self.standings[-1]

    @property
    def should_stop(self) -> bool:
        """Whether `patience` epochs in a row were no better than the best one before them."""
        patience = self.ending.patience
        return patience is not None and self.standings[-1].epoch - self.best.epoch >= patience

    def add(self, standing: Standing) -> None:
        """Take in the end of an epoch, whose weights are in the model as they would be served."""
        self.standings.append(standing)
        if self.ending.keep == "best" and self.best is standing:
            self.weights = {name: part.detach().clone() for name, part in self.theta.items()}

    @torch.no_grad()
    def release_(self) -> bool:
        """Put the weights that are kept into the model; False where none are."""
        for name, part in self.weights.items():
            self.theta[name].copy_(part)
        return bool(self.weights)

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add the weights to a resume state's tensors, and return what else it has to keep."""
        tensors |= {f"{_WEIGHTS}{name}": part for name, part in self.weights.items()}
        return {_STANDINGS: [asdict(each) for each in self.standings]}

    def restore(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what a resume state has kept, and take it out of `state`."""
        self.standings = [Standing(**each) for each in state.pop(_STANDINGS)]
        names = [name for name in self.theta if f"{_WEIGHTS}{name}" in tensors]
        self.weights = {name: tensors[f"{_WEIGHTS}{name}"].to(self.theta[name].device) for name in names}
