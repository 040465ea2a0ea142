"""python -m worker.sinks NAME PARENT: feed one tracker from standard input, one JSON object a line, until it ends.

The first line is the run's facts; steps, the audit and the end follow. The tracker's own output is discarded; an
error's type and text go to standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from app.ops.processes import end_with_parent
from worker.sinks import SINKS
from worker.sinks.base import RunFacts, Sink, Status

_NICE = 10


def main() -> int:
    """Feed the sink; return 0 if it took everything, else 1."""
    if not end_with_parent(int(sys.argv[2]), signal.SIGKILL):
        return 1
    os.nice(_NICE)
    told = os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    try:
        _feed(sys.argv[1])
    except Exception as error:  # whatever a tracker raises
        with suppress(OSError):
            os.write(told, f"{type(error).__name__}: {error}".encode()[:1000])
        return 1
    return 0


def _feed(name: str) -> None:
    facts: dict[str, Any] = json.loads(sys.stdin.readline())
    sink: Sink = SINKS.load(name)(RunFacts(**facts | {"tags": tuple(facts["tags"])}))
    status: Status = "interrupted"
    for line in sys.stdin:
        match json.loads(line):
            case {"step": int(step), "metrics": dict(metrics)}:
                sink.step(step, metrics)
            case {"audit": dict(figures), "gate": str(gate)}:
                sink.audit(figures, gate)
            case {"end": end}:
                status = end
    sink.close(status)


if __name__ == "__main__":
    sys.exit(main())
