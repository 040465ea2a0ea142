"""What a child tells its parent: one JSON object a line, with its `kind`.

kind        fields
phase       phase: embed | select | train | audit | package
progress    done, total: how far the phase is, where no steps say so
event       level, type, message, data: for the person who follows the job
metrics     step, total_steps, data: one training step's numbers, flat
resolved    data: the numbers that stand for "auto"
checkpoint  step, path (below the job's folder), metrics
warning     message: stays on the job
done        the results lie in the folder
failed      code, message, param, retryable
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from threading import Lock
from typing import Any

Message = dict[str, Any]

MAX_LINE = 1 << 20


class Report:
    """Writes messages to a file descriptor that nothing else writes to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = Lock()

    def phase(self, phase: str) -> None:
        self._send("phase", phase=phase)

    def progress(self, done: int, total: int) -> None:
        self._send("progress", done=done, total=total)

    def event(self, message: str, data: Mapping[str, Any], *, level: str = "info", type: str = "message") -> None:
        self._send("event", level=level, type=type, message=message, data=data)

    def metrics(self, step: int, total_steps: int, data: Mapping[str, float]) -> None:
        """JSON knows no NaN: what is not finite becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in data.items()}
        self._send("metrics", step=step, total_steps=total_steps, data=finite)

    def resolved(self, numbers: Mapping[str, float]) -> None:
        self._send("resolved", data=numbers)

    def checkpoint(self, step: int, path: str, metrics: Mapping[str, float]) -> None:
        self._send("checkpoint", step=step, path=path, metrics=metrics)

    def warning(self, message: str) -> None:
        self._send("warning", message=message)

    def done(self) -> None:
        self._send("done")

    def failed(self, code: str, message: str, param: str | None, *, retryable: bool) -> None:
        self._send("failed", code=code, message=message, param=param, retryable=retryable)

    def _send(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, **fields}, allow_nan=False).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]


def parse(line: bytes) -> Message | None:
    """The message in a line; None for a line that is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
