"""Keep the worker of the embedded mode running beside the HTTP service, and stop it with the service.

`python -m app.ops.supervisor PARENT MODULE` replaces itself by `python -m MODULE`, which gets SIGTERM when its parent
dies.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from threading import Event, Thread
from types import TracebackType
from typing import Self

from app.ops.processes import end_with_parent, python, safe_path

log = logging.getLogger(__name__)

READY_FD = "SPARD_READY_FD"  # variable with the descriptor to which a supervised process writes a byte when ready
_STEADY_S = 60.0  # after a run this long, the wait before a restart is short again
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 30.0
_LOOK_S = 0.2


class Supervisor:
    """Runs `python -m module` inside a `with` block, restarting it when it dies.

    At the end of the block it gets SIGTERM, and SIGKILL `grace_s` seconds later. Waits before restarts double from 1 s
    to 30 s.
    """

    def __init__(self, module: str, grace_s: float) -> None:
        self._module, self._grace_s = module, grace_s
        self._stop, self._is_at_work = Event(), False
        # The kernel ends the process with the thread that started it, so one long-lived thread starts them all.
        self._keeper = Thread(target=self._keep, name=f"{module} supervisor")

    @property
    def is_at_work(self) -> bool:
        """Return True if the process runs and has reported that it is ready."""
        return self._is_at_work

    def __enter__(self) -> Self:
        self._keeper.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._keeper.join()

    def _keep(self) -> None:
        wait_s = _MIN_WAIT_S
        while not self._stop.is_set():
            started = time.monotonic()
            process = self._run_until_it_ends()
            if self._stop.is_set():
                return _end(process, self._grace_s)
            wait_s = _MIN_WAIT_S if time.monotonic() - started > _STEADY_S else wait_s
            log.error(
                "the %s ended with code %s; starting it again in %.0f s", self._module, process.returncode, wait_s
            )
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
        return None

    def _run_until_it_ends(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it has ended or `_stop` is set."""
        ready, announce = os.pipe()
        os.set_blocking(ready, False)
        process = _start(self._module, announce)
        os.close(announce)
        while process.poll() is None and not self._stop.wait(_LOOK_S):
            with suppress(BlockingIOError):
                self._is_at_work = self._is_at_work or os.read(ready, 1) != b""
        self._is_at_work = False
        os.close(ready)
        return process


def announce_ready() -> None:
    """Report to the supervisor, if there is one, that this process is ready."""
    descriptor = os.environ.pop(READY_FD, None)
    if descriptor is not None:
        os.write(int(descriptor), b"1")
        os.close(int(descriptor))


def _start(module: str, announce: int) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own, so that Ctrl-C reaches only us and we stop it in order."""
    command = python(__name__, str(os.getpid()), module)
    environment = safe_path(os.environ) | {READY_FD: str(announce)}
    return subprocess.Popen(  # noqa: S603 - the command is ours
        command, start_new_session=True, pass_fds=[announce], env=environment
    )


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        log.warning("the worker did not stop within %.0f s; killing it", grace_s)
        process.kill()
        process.wait()


def _exec_module(parent: int, module: str) -> None:
    if not end_with_parent(parent, signal.SIGTERM):
        sys.exit(f"{module}: the parent is gone already")
    os.execv(sys.executable, python(module))  # noqa: S606 - the module is named by our own code


if __name__ == "__main__":
    _exec_module(int(sys.argv[1]), sys.argv[2])
