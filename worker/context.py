"""What every stage of a job works with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spard.config import Recipe
from spard.errors import Stopped
from spard.models import Base
from spard.proof import CleanProcess
from spard.recipe import RunSpec
from worker.cache import Cache
from worker.folder import Assignment, Folder
from worker.report import Report


@dataclass(frozen=True, slots=True)
class Context:
    """One job in its child: what is asked, the base model, and where outputs and news go."""

    assignment: Assignment
    folder: Folder
    base: Base
    cache: Cache
    clean: CleanProcess
    report: Report
    should_stop: Callable[[], bool]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def run(self) -> RunSpec:
        return self.assignment.run

    @property
    def recipe(self) -> Recipe:
        return self.assignment.run.recipe

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; parts of one that are done at another time add up."""
        self.go_on()
        started = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)

    def go_on(self) -> None:
        """Raise `Stopped` when the parent has asked for it; for places where there is nothing to save."""
        if self.should_stop():
            raise Stopped("the worker stops")
