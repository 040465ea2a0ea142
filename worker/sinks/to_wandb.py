"""Metric sink for Weights & Biases; its own variables, as WANDB_API_KEY and WANDB_MODE, set account and mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from worker.sinks.base import RunFacts, Sink, Status


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def audit(self, figures: Mapping[str, float], gate: str) -> None:
        self._run.summary.update({**figures, "safety/gate": gate})

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def open_sink(facts: RunFacts) -> Sink:
    """Create or continue the run that has the job's id."""
    run = wandb.init(
        id=facts.id,
        resume="allow",
        project=facts.project,
        entity=facts.entity,
        name=facts.name,
        tags=list(facts.tags) or None,
        config=dict(facts.params),
        dir=facts.folder,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    return _Wandb(run)
