"""Ends of epochs: what is measured there, and the comparison that picks the best one and stops the training early.

Losses on validation rows are measured here, and so are the reference log-probabilities of preference pairs, which these
losses and those of the training need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from spard.config import Ending, Recipe
from spard.data.chat import EncodedSample
from spard.losses.cross_entropy import Evaluation, evaluate
from spard.losses.relative import evaluate_pairs, reference_logps
from spard.methods.base import Metrics
from spard.models.base import Base
from spard.models.budget import Tell


def _none() -> Tensor:
    return torch.zeros(0, 2, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class References:
    """Log-probabilities of both answers of each pair under the reference model, `[N, 2]` in float64, on the CPU."""

    task_N2: Tensor = field(default_factory=_none)
    validation_N2: Tensor = field(default_factory=_none)

    @classmethod
    def from_base(
        cls, base: Base, task: Sequence[EncodedSample], validation: Sequence[EncodedSample], tell: Tell | None = None
    ) -> Self:
        """Compute the log-probabilities with the model as it is now; `tell` gets the pairs done and in all, twice."""
        pad_id = base.tokenizer.pad_token_id
        return cls(*(reference_logps(base.model, pairs, pad_id, tell) for pairs in (task, validation)))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name, for resume states."""
        return {"task_N2": self.task_N2, "validation_N2": self.validation_N2}


def evaluate_validation(
    base: Base,
    rows: Sequence[EncodedSample],
    recipe: Recipe,
    references: References | None,
    places: Sequence[int] | None = None,
    tell: Tell | None = None,
) -> Evaluation:
    """Evaluate the model as it is now on the validation rows, or on those at `places`.

    For preference pairs `references` are required; they hold the log-probabilities of all validation rows. `tell` gets
    the rows done and in all.
    """
    places, pad_id = range(len(rows)) if places is None else places, base.tokenizer.pad_token_id
    taken = [rows[i] for i in places]
    if recipe.dpo is None or references is None:
        return evaluate(base.model, taken, pad_id, tell=tell)
    held_N2 = references.validation_N2[list(places)]
    return evaluate_pairs(base.model, taken, held_N2, recipe.dpo.strength, pad_id, tell)


_WEIGHTS, _STANDINGS = "best/", "standings"  # keys in a resume state


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end of an epoch: the metrics of its last step, and the model in the form that is served.

    is_kept         True if its checkpoint will still exist after the run; if False, the callback gets this epoch end
                    again should the run end within the next epochs
    is_shown_again  True in that second call
    """

    epoch: int
    step: int
    total_steps: int
    metrics: Metrics
    model: Any
    references: References | None = None
    is_kept: bool = True
    is_shown_again: bool = False


@dataclass(frozen=True, slots=True)
class EpochResult:
    """The measurements at the end of an epoch, by which a run compares its epochs.

    within    True if the gate would pass the rates on the development shares; None: there are no such shares
    attacked  attack success rate on the development shares, 0 to 1; None likewise
    loss      mean loss on the validation rows
    """

    epoch: int
    step: int
    within: bool | None
    attacked: float | None
    loss: float

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key, lower is better: within the gate's bounds first, then fewer successful attacks, then the loss."""
        attacked = 0.0 if self.within else self.attacked or 0.0
        return not self.within, attacked, math.inf if math.isnan(self.loss) else self.loss


EpochCallback = Callable[[EpochEnd], None]
EpochEvaluator = Callable[[EpochEnd], EpochResult]


@dataclass(frozen=True, slots=True)
class EpochChoice:
    """The epoch end that a run released, all epoch ends it compared, and the number of epochs that were planned."""

    released: EpochResult
    standings: tuple[EpochResult, ...]
    planned_epochs: int


class Best:
    """The standings of all epoch ends, and the best epoch's weights if the run releases the best epoch."""

    def __init__(self, ending: Ending, theta: Mapping[str, Tensor]) -> None:
        self.ending, self.theta = ending, theta
        self.standings: list[EpochResult] = []
        self.weights: dict[str, Tensor] = {}

    @property
    def best(self) -> EpochResult:
        """The best standing so far; among equal standings the earliest."""
        return min(self.standings, key=lambda each: each.rank)

    @property
    def released_standing(self) -> EpochResult:
        """The standing of the epoch end whose weights the run releases."""
        return self.best if self.ending.keep == "best" else self.standings[-1]

    @property
    def should_stop(self) -> bool:
        """True if the last `patience` epochs were no better than the best one before them."""
        patience = self.ending.patience
        return patience is not None and self.standings[-1].epoch - self.best.epoch >= patience

    def add(self, standing: EpochResult) -> None:
        """Add the standing of an epoch end; its weights must be in the model, in the form that is served."""
        self.standings.append(standing)
        # `is`: of equal standings the earliest is the best, and its weights are kept already.
        if self.ending.keep == "best" and self.best is standing:
            self.weights = {name: part.detach().clone() for name, part in self.theta.items()}

    @torch.no_grad()
    def release_(self) -> bool:
        """Copy the weights of the best epoch end into the model; return False if none were kept."""
        for name, part in self.weights.items():
            self.theta[name].copy_(part)
        return bool(self.weights)

    def save(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Add the weights to a resume state's tensors, and return the JSON that belongs to them."""
        tensors |= {f"{_WEIGHTS}{name}": part for name, part in self.weights.items()}
        return {_STANDINGS: [asdict(each) for each in self.standings]}

    def restore(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore standings and weights of a resume state, removing the standings from `state`."""
        self.standings = [EpochResult(**each) for each in state.pop(_STANDINGS)]
        names = [name for name in self.theta if f"{_WEIGHTS}{name}" in tensors]
        self.weights = {name: tensors[f"{_WEIGHTS}{name}"].to(self.theta[name].device) for name in names}
