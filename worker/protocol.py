"""What a child tells its parent: one JSON object a line, with its `kind`.

The kinds are those of `spard.pipeline.messages`, paths of checkpoints being relative to the job's folder, and

kind        fields
failed      code, message, param, retryable
cached      entry, made: a tensor of the machine's cache that was read, and whether it was made just now
ask         id, judge, system, user: a question to a judge; the answer is a line with id, and text or error
"""

from __future__ import annotations

import json
import os
from threading import Lock

from spard.pipeline.messages import Message as Message
from spard.pipeline.messages import Reporter

MAX_LINE = 1 << 20


class Report(Reporter):
    """Writes messages to a file descriptor that nothing else writes to."""

    def __init__(self, fd: int) -> None:
        super().__init__(self._write)
        self.fd = fd
        self._lock = Lock()

    def report_failed(self, code: str, message: str, param: str | None, *, retryable: bool) -> None:
        """Tell why the job came to an end; `retryable` says whether another attempt may end better."""
        failure = {"code": code, "message": message, "param": param, "retryable": retryable}
        self._write({"kind": "failed", **failure})

    def report_cached(self, entry: str, made: bool) -> None:
        """Tell of a tensor in the machine's cache, by its path there."""
        self._write({"kind": "cached", "entry": entry, "made": made})

    def ask(self, number: int, judge: int, system: str, user: str) -> None:
        """Put a question to the judge of that index; the answer comes under `number`."""
        self._write({"kind": "ask", "id": number, "judge": judge, "system": system, "user": user})

    def _write(self, message: Message) -> None:
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self.fd, line) :]


def parse(line: bytes) -> Message | None:
    """Read the message in a line; None if there is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
