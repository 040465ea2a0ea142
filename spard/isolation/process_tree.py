"""Runs a command so that it and all its descendants end together: python -I -S -c BOOT PARENT COMMAND...

The command runs in its own process group. SIGTERM, the end of our parent or the end of the command kills the whole
group at once. This process adopts orphans and waits for them: when it ends, no descendant is left.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from spard.isolation import kernel

_NOT_STARTED = 127
_BY_SIGNAL = 128


def main() -> None:
    """Run the command and exit with its status, or with 128 plus the number of the signal that ended it."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        kernel.take_up_orphans()
        kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        _exec_command(command)
    with suppress(OSError):  # parent and child both set the group, so it is set whichever runs first
        os.setpgid(child, child)
    signal.signal(signal.SIGTERM, lambda number, frame: _end(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os._exit(_wait_and_reap(child))


def _exec_command(command: list[str]) -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        kernel.die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        os.execv(command[0], command)  # noqa: S606 - the command is ours
    finally:
        os._exit(_NOT_STARTED)


def _end(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _wait_and_reap(child: int) -> int:
    """Wait for the command and for all orphans; return the command's exit status."""
    found = 0
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            return found
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else _BY_SIGNAL - code
            _end(child)  # kill the rest of its group
