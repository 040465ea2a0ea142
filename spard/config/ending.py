"""Which weights a run ends with, and when its training ends before all its epochs are over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound


@dataclass(frozen=True, slots=True)
class Ending:
    """Which weights a run ends with, and when its training ends early.

    keep      "last": those of the last step; "best": those of the best end of an epoch, by safety within the gate's
              bounds and then by the loss on validation rows. What is released is decided by the audit of these weights.
    patience  ends of epochs in a row that are no better than the best one, after which training ends; None: it never
              ends early
    prompts   of each suite that the gate looks at, asked at each end of an epoch and never by the gate: at most this
              many, and at most a fifth of the suite (`spard.evaluation.development`)

    Either needs LoRA. Without a validation file a part of the customer's rows is held out to validate on.
    """

    keep: Literal["last", "best"] = "last"
    patience: Annotated[int, Bound(ge=1, le=50)] | None = None
    prompts: Annotated[int, Bound(ge=20, le=1000)] = 40

    @property
    def compares(self) -> bool:
        """Whether ends of epochs are measured and compared at all."""
        return self.keep == "best" or self.patience is not None
