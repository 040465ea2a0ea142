"""Describe the base model that a waiting child reads ahead: the one that the previous job used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from spard.config import Quantization
from worker.workdir import Assignment


@dataclass(frozen=True, slots=True)
class Wanted:
    """A base model as a job loads it: folder, revision, quantization, and the digests of its files.

    Two equal objects load the same weights, bit for bit.
    """

    model: str
    revision: str | None
    quantization: Quantization
    weights: Mapping[str, str]

    def line(self) -> str:
        """Return the line that asks a child to read this model; it begins with "{", as no folder's path does."""
        return json.dumps(asdict(self))


def prefetch_key(assignment: Assignment) -> Wanted | None:
    """Return the base model that a job's child loads; None if ranks load it, or the files' digests are unknown."""
    if assignment.processes > 1 or not assignment.weights:
        return None
    run = assignment.run
    return Wanted(run.model, run.revision, run.recipe.quantization, dict(assignment.weights))


def parse_prefetch(line: str) -> Wanted | None:
    """Parse a line from the worker: return the base model to read ahead, or None if the line is a job's folder."""
    return Wanted(**json.loads(line)) if line.startswith("{") else None
