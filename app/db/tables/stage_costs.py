"""What the stages of a job took, as its row keeps it."""

from __future__ import annotations

from typing_extensions import TypedDict


class StageCost(TypedDict):
    """What a stage took, and how much it worked on (`spard.pipeline.costs`)."""

    seconds: float
    units: int


StageCosts = dict[str, StageCost]
