"""Types of the stored costs of a job's stages."""

from __future__ import annotations

from typing_extensions import TypedDict


class StageCost(TypedDict):
    """The seconds of a stage, and its units of work (`spard.pipeline.costs`)."""

    seconds: float
    units: int


StageCosts = dict[str, StageCost]
