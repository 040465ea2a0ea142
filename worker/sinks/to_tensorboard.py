"""Metric sink for TensorBoard: writes event files, with a folder for each job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from worker.sinks.base import RunFacts, Sink, Status


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))
        self._step = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def audit(self, figures: Mapping[str, float], gate: str) -> None:
        self.step(self._step, {**figures, f"safety/gate/{gate}": 1.0})

    def close(self, status: Status) -> None:
        self._writer.close()


def open_sink(facts: RunFacts) -> Sink:
    """Return a sink that writes to `tensorboard/JOB` in the sinks' folder."""
    return _TensorBoard(Path(facts.folder) / "tensorboard" / facts.id)
