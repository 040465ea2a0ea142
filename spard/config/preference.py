"""The settings of learning from preference pairs, by DPO (Rafailov et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Auto, Bound

AUTO_BETA = 0.1  # as in the paper's experiments
Beta = Annotated[float, Bound(gt=0, le=2)] | Auto


@dataclass(frozen=True, slots=True)
class Dpo:
    """Minimize -log sigmoid(beta (margin of the model - margin of the reference)); see `spard.losses.preference`.

    beta  strength of the pull toward the reference, within OpenAI's bounds; "auto" is 0.1.
    """

    beta: Beta = "auto"

    @property
    def strength(self) -> float:
        """The number for `beta`."""
        return AUTO_BETA if self.beta == "auto" else self.beta
