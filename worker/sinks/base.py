"""What a metric sink is, and what it is told of a run. No row, prompt or reply of anybody is ever among it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

PROJECT = "spard"  # where the integration names none
Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One job.

    id       of the job; a later attempt of it goes on with the same run
    name     that a person knows the run by
    params   what was asked for, flat
    folder   where a sink that writes files may do so
    project, entity, tags  of the customer's integration; `entity` is None and there are no tags in the provider's own
    """

    id: str
    name: str
    folder: str
    params: Mapping[str, Any] = field(default_factory=dict)
    project: str = PROJECT
    entity: str | None = None
    tags: tuple[str, ...] = ()


class Sink(Protocol):
    """A tracker's run, in a process of its own: what it raises ends that process and nothing else."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; steps may come twice when an attempt goes on."""
        ...

    def audit(self, figures: Mapping[str, float], gate: str) -> None:
        """Take what the audit measured, and the gate's decision."""
        ...

    def close(self, status: Status) -> None:
        """End the run, or this attempt's part of it."""
        ...
