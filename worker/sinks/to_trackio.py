"""Metric sink for Trackio; its own variable TRACKIO_DIR names the folder of its files."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from worker.sinks.base import RunFacts, Sink, Status


class _Trackio:
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        trackio.log(dict(metrics), step=step)

    def audit(self, figures: Mapping[str, float], gate: str) -> None:
        trackio.log({**figures, "safety/gate": gate})

    def close(self, status: Status) -> None:
        trackio.finish()


def open_sink(facts: RunFacts) -> Sink:
    """Create or continue the run that has the job's id as its name."""
    trackio.init(project=facts.project, name=facts.id, resume="allow", config=dict(facts.params), embed=False)
    return _Trackio()
