"""Reference log-probabilities of preference pairs, and losses on validation rows, which may be pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from spard.config import Recipe
from spard.data.chat import Encoded
from spard.losses.cross_entropy import Evaluation, evaluate
from spard.losses.preference import evaluate_pairs, reference_logps
from spard.models.base import Base


def _none() -> Tensor:
    return torch.zeros(0, 2, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class References:
    """Log-probabilities of both answers of each pair under the reference model, `[N, 2]` in float64, on the CPU."""

    task_N2: Tensor = field(default_factory=_none)
    validation_N2: Tensor = field(default_factory=_none)

    @classmethod
    def from_base(cls, base: Base, task: Sequence[Encoded], validation: Sequence[Encoded]) -> Self:
        """Compute the log-probabilities with the model as it is now."""
        pad_id = base.tokenizer.pad_token_id
        return cls(reference_logps(base.model, task, pad_id), reference_logps(base.model, validation, pad_id))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name, for resume states."""
        return {"task_N2": self.task_N2, "validation_N2": self.validation_N2}


def evaluate_validation(
    base: Base,
    rows: Sequence[Encoded],
    recipe: Recipe,
    references: References | None,
    places: Sequence[int] | None = None,
) -> Evaluation:
    """Evaluate the model as it is now on the validation rows, or on those at `places`.

    For preference pairs `references` are required; they hold the log-probabilities of all validation rows.
    """
    places, pad_id = range(len(rows)) if places is None else places, base.tokenizer.pad_token_id
    taken = [rows[i] for i in places]
    if recipe.dpo is None or references is None:
        return evaluate(base.model, taken, pad_id)
    return evaluate_pairs(base.model, taken, references.validation_N2[list(places)], recipe.dpo.strength, pad_id)
