"""The messages between a child and its parent, one line each.

The child writes JSON objects with their `kind`. The kinds are those of `spard.pipeline.messages`, with checkpoint paths
relative to the job's folder, and these:

kind        fields
failed      code, message, param, retryable
cached      entry, made: a tensor of the machine's cache that was read; made is true if it was just computed
ask         id, judge, system, user: a question to a judge; the answer is a line with id, and text or error

The parent writes the name of a job's folder to a waiting child. Before that it may name a base model
(`ModelRequest`) that the child reads ahead: the one that the previous job used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from threading import Lock

from spard.config import Quantization
from spard.pipeline.messages import Message as Message
from spard.pipeline.messages import Reporter
from worker.workdir import Assignment

MAX_LINE = 1 << 20


class Report(Reporter):
    """Writes messages to a file descriptor, which nothing else may write to; safe for several threads."""

    def __init__(self, fd: int) -> None:
        super().__init__(self._write)
        self.fd = fd
        self._lock = Lock()

    def report_failed(self, code: str, message: str, param: str | None, *, retryable: bool) -> None:
        """Report why the job failed; `retryable` is True if another attempt may succeed."""
        failure = {"code": code, "message": message, "param": param, "retryable": retryable}
        self._write({"kind": "failed", **failure})

    def report_cached(self, entry: str, made: bool) -> None:
        """Report that a tensor of the machine's cache was read or computed; `entry` is its path in the cache."""
        self._write({"kind": "cached", "entry": entry, "made": made})

    def ask(self, number: int, judge: int, system: str, user: str) -> None:
        """Send question `number` to the judge of index `judge`; the answer comes later, with the same number."""
        self._write({"kind": "ask", "id": number, "judge": judge, "system": system, "user": user})

    def _write(self, message: Message) -> None:
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        with self._lock:
            while line:  # os.write may take a part only
                line = line[os.write(self.fd, line) :]


def parse(line: bytes) -> Message | None:
    """Parse a line; return None if it is not a JSON object with a `kind`."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None


@dataclass(frozen=True, slots=True)
class ModelRequest:
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


def prefetch_key(assignment: Assignment) -> ModelRequest | None:
    """Return the base model that a job's child loads; None if ranks load it, or the files' digests are unknown."""
    if assignment.processes > 1 or not assignment.weights:
        return None
    run = assignment.run
    return ModelRequest(run.model, run.revision, run.recipe.quantization, dict(assignment.weights))


def parse_prefetch(line: str) -> ModelRequest | None:
    """Parse a line from the worker: return the base model to read ahead, or None if the line is a job's folder."""
    return ModelRequest(**json.loads(line)) if line.startswith("{") else None
