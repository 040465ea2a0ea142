"""The settings of a run's end: which weights it releases, and early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound


@dataclass(frozen=True, slots=True)
class Ending:
    """Which weights a run ends with, and early stopping.

    keep      "last": the weights of the last step. "best": those of the best epoch end, by safety within the gate's
              bounds and then by the loss on validation rows. The audit of these weights decides on their release.
    patience  training ends after this many epoch ends in a row that are no better than the best one; None: never early
    prompts   prompts of each gated suite that are asked at each epoch end and never by the gate: at most this many, and
              at most a fifth of the suite (`spard.evaluation.development`)

    Both settings need LoRA. Without a validation file a part of the customer's rows is held out for validation.
    """

    keep: Literal["last", "best"] = "last"
    patience: Annotated[int, Bound(ge=1, le=50)] | None = None
    prompts: Annotated[int, Bound(ge=20, le=1000)] = 40

    @property
    def compares(self) -> bool:
        """True if epoch ends are measured and compared."""
        return self.keep == "best" or self.patience is not None
