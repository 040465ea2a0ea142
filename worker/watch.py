"""The stages of an attempt as the parent sees them: each is a span of the trace and a figure for Prometheus."""

from __future__ import annotations

import time

from opentelemetry.trace import Span

from app import traces
from worker.figures import Figures


class Watch:
    """`begin` ends the stage before; spans belong to the one that is current when their stage begins."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._now: tuple[str, float, Span] | None = None

    def begin(self, stage: str) -> None:
        self.end()
        self._now = stage, time.monotonic(), traces.tracer().start_span(f"stage {stage}")

    def end(self) -> None:
        if self._now:
            stage, began, span = self._now
            span.end()
            self._figures.note_stage(stage, time.monotonic() - began)
            self._now = None
