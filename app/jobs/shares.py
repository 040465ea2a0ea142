"""How much of the GPUs each project had of late, and whose turn it is by that.

Next is the project with the fewest running jobs, and of several such the one that had the least GPU time: so a project
with one job waits for one job of the others. Time fades: after six hours it counts half, as in the admission fair
sharing of Kueue. It decides where there are more projects than GPUs, of which each runs one job or none: those with
jobs of hours would have nearly all of the GPUs if they only took turns. Both count by the project's weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp2, log

HALF_LIFE_S = 6 * 3600.0
_LEAST_S = 1.0  # that a running job counts: who was just served is not next


@dataclass(frozen=True, slots=True)
class Standing:
    """How a project stands against others.

    running    its running jobs
    used       GPU seconds that it had, those that run now among them, as far as they have not faded
    weight     its share against others'; twice the weight has twice the time
    served_at  when a job of its was last started
    is_ready   it has a job to start
    """

    project_id: str
    running: int = 0
    used: float = 0.0
    weight: float = 1.0
    served_at: datetime | None = None
    is_ready: bool = True


def in_turn(standings: Iterable[Standing]) -> list[Standing]:
    """Return the projects in the order in which they are served; one of weight 3 counts as running none with two."""

    def turn(one: Standing) -> tuple[float, float, float, str]:
        served = one.served_at.timestamp() if one.served_at else 0.0
        return one.running // one.weight, one.used / one.weight, served, one.project_id

    return sorted(standings, key=turn)


def fade(seconds: float, since: float) -> float:
    """Return what is left of GPU seconds that were counted `since` seconds ago."""
    return seconds * exp2(-max(since, 0.0) / HALF_LIFE_S)


def running(seconds: float) -> float:
    """Return what counts of a job that has run for `seconds` until now, of which the first have faded most."""
    steady = HALF_LIFE_S / log(2)
    return max(_LEAST_S, steady * (1 - exp2(-max(seconds, 0.0) / HALF_LIFE_S)))


def parts(standings: Sequence[Standing]) -> dict[str, float]:
    """Return each project's part of all GPU time that has not faded."""
    whole = sum(one.used for one in standings)
    return {one.project_id: one.used / whole if whole else 0.0 for one in standings}
