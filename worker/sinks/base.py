"""The protocol of a metric sink and the facts of a run that it gets; they never contain rows, prompts or replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

PROJECT = "spard"  # the tracker's project, if the integration names none
Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts of one job that its sinks get.

    id       the job's id; a later attempt continues the same run
    name     the run's name for people
    params   the requested model, seed, defense and hyperparameters, flat
    folder   the folder for sinks that write files
    project, entity, tags  from the customer's integration; the provider's own sinks get the default, None and no tags
    """

    id: str
    name: str
    folder: str
    params: Mapping[str, Any] = field(default_factory=dict)
    project: str = PROJECT
    entity: str | None = None
    tags: tuple[str, ...] = ()


class Sink(Protocol):
    """A tracker's run, in a process of its own: an exception ends only that process."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; a step may come twice when a later attempt repeats it."""
        ...

    def audit(self, figures: Mapping[str, float], gate: str) -> None:
        """Record the audit's rates and the gate's decision."""
        ...

    def close(self, status: Status) -> None:
        """End the run, or this attempt's part of it."""
        ...
