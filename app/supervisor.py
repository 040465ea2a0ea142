"""Keeps the worker of the embedded mode running beside the HTTP service, and ends it with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

log = logging.getLogger(__name__)

_STEADY_S = 60.0  # a worker that lived this long counts as steady: the wait is short again
_MIN_WAIT_S, _MAX_WAIT_S = 1.0, 30.0


@contextmanager
def supervised(module: str, grace_s: float) -> Iterator[None]:
    """`python -m module` runs inside the block: started again when it dies, asked to stop at the end."""
    stop = Event()
    # The kernel ends the process with the thread that started it, so one thread starts every one and waits.
    keeper = Thread(target=_keep, args=(module, stop, grace_s), name=f"{module} supervisor")
    keeper.start()
    try:
        yield
    finally:
        stop.set()
        keeper.join()


def _keep(module: str, stop: Event, grace_s: float) -> None:
    wait_s = _MIN_WAIT_S
    while not stop.is_set():
        started = time.monotonic()
        process = _start(module)
        while process.poll() is None and not stop.wait(0.2):
            pass
        if stop.is_set():
            return _end(process, grace_s)
        wait_s = _MIN_WAIT_S if time.monotonic() - started > _STEADY_S else wait_s
        log.error("the %s ended with code %s; starting it again in %.0f s", module, process.returncode, wait_s)
        stop.wait(wait_s)
        wait_s = min(2 * wait_s, _MAX_WAIT_S)
    return None


def _start(module: str) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C at the terminal reaches us alone, and we pass it on in order."""
    command = [sys.executable, "-m", "app.tethered", str(os.getpid()), module]
    return subprocess.Popen(command, start_new_session=True)  # noqa: S603 - the command is ours


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        log.warning("the worker did not stop within %.0f s; killing it", grace_s)
        process.kill()
        process.wait()
