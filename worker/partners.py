"""The other processes of a job that is trained on several GPUs: started by its child, which is the first of them.

When one ends before its time the child ends too, since it would wait for ever; the parent sees that and tries again.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch

from spard import ranks
from worker.folder import Folder

log = logging.getLogger(__name__)


@contextmanager
def partners(folder: Folder, count: int, device: torch.device) -> Iterator[None]:
    """Train as the first of `count` processes inside the block."""
    is_over = Event()
    folder.meeting.unlink(missing_ok=True)
    started = [_start(folder, rank, count) for rank in range(1, count)]
    for process in started:
        Thread(target=_watch, args=(process, is_over), daemon=True).start()
    try:
        with ranks.joined(folder.meeting, 0, count, device):
            yield
    finally:
        is_over.set()
        for process in started:
            process.kill()
            process.wait()


def _start(folder: Folder, rank: int, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "worker.partner", str(folder.root), str(rank), str(count), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - the command is ours


def _watch(process: subprocess.Popen[bytes], is_over: Event) -> None:
    if process.wait() and not is_over.is_set():
        log.error("a partner ended with %d; so do we", process.returncode)
        os._exit(1)
