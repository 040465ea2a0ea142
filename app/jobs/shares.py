"""Order projects by their recent GPU time.

Next is the project with the fewest running jobs, and among several the project with the least GPU time; so a project
with one job waits for at most one job of another. GPU time fades: after six hours it counts half, as in the admission
fair sharing of Kueue. It matters if there are more projects than GPUs, and each runs one job or none: without it,
projects whose jobs take hours occupy nearly all GPUs although projects take turns. Both counts are divided by the
project's weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp2, log

HALF_LIFE_S = 6 * 3600.0
_LEAST_S = 1.0  # a running job counts at least this, so that a project just served is not next again


@dataclass(frozen=True, slots=True)
class Standing:
    """A project's position relative to others.

    running    the number of its running jobs
    used       its GPU seconds, faded, including those of running jobs
    weight     its share relative to others; twice the weight gets twice the time
    served_at  when one of its jobs was last started
    is_ready   it has a job to start
    """

    project_id: str
    running: int = 0
    used: float = 0.0
    weight: float = 1.0
    served_at: datetime | None = None
    is_ready: bool = True


def in_turn(standings: Iterable[Standing]) -> list[Standing]:
    """Return the projects in the order in which they are served.

    Running jobs are divided by the weight, rounded down: a project of weight 3 with two running jobs counts as running
    none.
    """

    def turn(one: Standing) -> tuple[float, float, float, str]:
        served = one.served_at.timestamp() if one.served_at else 0.0
        return one.running // one.weight, one.used / one.weight, served, one.project_id

    return sorted(standings, key=turn)


def fade(seconds: float, since: float) -> float:
    """Return the GPU seconds that remain of `seconds` counted `since` seconds ago: half after `HALF_LIFE_S`."""
    return seconds * exp2(-max(since, 0.0) / HALF_LIFE_S)


def running(seconds: float) -> float:
    """Return the faded GPU seconds of a job that has run for `seconds` until now.

    This is the integral of `fade` over the run, and at least one second.
    """
    # The integral of 2^(-t / half-life) from 0 to `seconds`; `steady` is its limit for a job that runs forever.
    steady = HALF_LIFE_S / log(2)
    return max(_LEAST_S, steady * (1 - exp2(-max(seconds, 0.0) / HALF_LIFE_S)))


def parts(standings: Sequence[Standing]) -> dict[str, float]:
    """Return each project's share, from 0 to 1, of the recent GPU time of all (see `fade`)."""
    whole = sum(one.used for one in standings)
    return {one.project_id: one.used / whole if whole else 0.0 for one in standings}
