"""python -m worker.follower --leader HOST --job ID --token N: run a job's ranks on any machine after its first.

It holds no credential. It works in a folder that it shares with the job's worker (`worker.nodes`), and starts its ranks
when that worker says so. It ends when the worker says that the attempt is over, or when the connection is lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from threading import Event

import structlog

from app.errors import Unfit
from app.ops import logs
from app.ops.lifecycle import until_told
from app.settings import Settings, get_settings
from worker import gpu
from worker.failures import Memory, MemoryKills
from worker.nodes import LOST_S, Wire
from worker.process import COMMAND, Child, environment
from worker.sandbox import AllowedPaths, ChildSandbox
from worker.workdir import NODE, Folder

log = structlog.get_logger(__name__)

_LOOK_S = 0.1
_AGAIN_S = 1.0
_INDEX = "JOB_COMPLETION_INDEX"  # of the pod within its Job, from 0


def main() -> None:
    """Follow the worker of one job; exit with 0 if the worker ended the attempt, else with 1."""
    asked, stop = _parse_arguments(), Event()
    try:
        settings = get_settings()
        gpu.check(settings)
    except Unfit as error:
        raise SystemExit(f"spard: {error}") from None
    logs.set_up(settings.log_format)
    raise SystemExit(0 if until_told(partial(follow, asked, settings, stop), stop.set) else 1)


def follow(asked: argparse.Namespace, settings: Settings, stop: Event, lost_s: float = LOST_S) -> bool:
    """Connect to the worker of a job and run its ranks here; return True if the worker ended the attempt.

    False if the worker was not reached in time, its connection was lost for `lost_s` seconds, or `stop` came first.
    """
    wire = _connect(asked, settings, stop, lost_s)
    if wire is None:
        log.error("the job's worker is not there", leader=asked.leader)
        return False
    child = Child(COMMAND, environment(settings) | {NODE: str(asked.node)}, ChildSandbox.from_settings(settings))
    try:
        return _Share(wire, child, stop).serve()
    finally:
        child.kill()
        wire.close()


class _Share:
    """This machine's part of an attempt."""

    def __init__(self, wire: Wire, child: Child, stop: Event) -> None:
        self._wire, self._child, self._stop = wire, child, stop
        self._is_told = False  # the worker knows that we have to stop
        self._memory = MemoryKills()
        self._kills = self._memory.read()

    def serve(self) -> bool:
        """Follow the worker's messages; return True if it ended the attempt, False if it is lost or we stop first."""
        is_started = is_reported = is_done = False
        while True:
            is_lost = self._wire.is_lost.is_set()  # read before the queue: once it is set, no message comes later
            match self._wire.next_message(_LOOK_S):
                case {"kind": "start", "folder": str(root), "readable": list(readable), "writable": list(writable)}:
                    given = AllowedPaths(tuple(map(str, readable)), tuple(map(str, writable)))
                    self._child.begin(Folder(Path(root)), given)
                    is_started = True
                case {"kind": "end"}:
                    return True
                case None if is_lost:
                    log.error("the job's worker is lost")
                    return False
            message = self._child.receive(0.0)
            is_done = is_done or (message is not None and message["kind"] == "done")
            if self._stop.is_set() and not is_started:
                return False
            if self._stop.is_set() and not self._is_told:
                self._wire.tell({"kind": "leaving"})
                self._is_told = True
            if self._child.is_over and not is_reported:
                log.info("the ranks have ended", code=self._child.exit_code, is_done=is_done)
                self._wire.tell({"kind": "ended", "is_done": is_done, **self._kill()})
                is_reported = True

    def _kill(self) -> dict[str, object]:
        """Return the fields of `ended` that say if the ranks were killed, and whose memory was exhausted."""
        is_killed = self._child.exit_code == -signal.SIGKILL
        memory = self._memory.memory_at_kill(self._kills) if is_killed else None
        return {"is_out_of_memory": memory is Memory.limit, "is_killed": is_killed, "memory": memory}


def _connect(asked: argparse.Namespace, settings: Settings, stop: Event, lost_s: float) -> Wire | None:
    """Connect to the worker, retrying until it listens; return None after the wait, or when `stop` is set."""
    give_up_at = time.monotonic() + settings.nodes_wait_s
    while not stop.is_set() and time.monotonic() < give_up_at:
        try:
            end = socket.create_connection((asked.leader, settings.nodes_port), timeout=lost_s)
        except OSError:  # its name is not known yet, or it does not listen yet
            stop.wait(_AGAIN_S)
            continue
        wire = Wire(end, lost_s)
        wire.tell({"kind": "join", "job": asked.job, "token": asked.token, "node": asked.node})
        return wire
    return None


def _parse_arguments() -> argparse.Namespace:
    about = "Run the ranks of a job on a machine that is not its first."
    parser = argparse.ArgumentParser(prog="python -m worker.follower", description=about)
    parser.add_argument("--leader", metavar="HOST", required=True, help="where the job's worker is")
    parser.add_argument("--job", metavar="ID", required=True)
    parser.add_argument("--token", type=int, metavar="N", required=True, help="of the job's lease")
    asked = parser.parse_args()
    asked.node = int(os.environ.get(_INDEX, "0")) + 1
    return asked


if __name__ == "__main__":
    main()
