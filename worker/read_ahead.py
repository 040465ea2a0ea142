"""Which base model a child reads ahead while it waits for a job: that of the job before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from spard.config import Quantization
from worker.workdir import Assignment


@dataclass(frozen=True, slots=True)
class Wanted:
    """A base model as a job loads it: where its files are, their digests, and how it is held.

    What is equal is the same model, bit for bit.
    """

    model: str
    revision: str | None
    quantization: Quantization
    weights: Mapping[str, str]

    def line(self) -> str:
        """Return what a child is told that is to read it ahead; no folder's name begins so."""
        return json.dumps(asdict(self))


def prefetch_key(assignment: Assignment) -> Wanted | None:
    """Return what a job's child loads; None where ranks load it, or the digests of its files are not known."""
    if assignment.processes > 1 or not assignment.weights:
        return None
    run = assignment.run
    return Wanted(run.model, run.revision, run.recipe.quantization, dict(assignment.weights))


def parse_prefetch(line: str) -> Wanted | None:
    """Return what a line asks to read ahead; None for the name of a folder."""
    return Wanted(**json.loads(line)) if line.startswith("{") else None
