"""The other processes of a job that is trained on several GPUs: started by its child, which is the first of them.

When one ends before its time the child ends too, since it would wait for ever; the parent sees that and tries again.
A partner whose GPU has too little memory leaves a word of it, and the child reports that as if it were its own.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import torch

from app.ops.processes import python
from spard import distributed
from spard.errors import OutOfGpuMemory, is_gpu_out_of_memory
from worker.failures import failure
from worker.protocol import Report
from worker.workdir import Folder

log = logging.getLogger(__name__)

_PROGRAM = "worker.rank"


@contextmanager
def partners(folder: Folder, count: int, device: torch.device, report: Report) -> Iterator[None]:
    """Train as the first of `count` processes inside the block."""
    is_over = Event()
    folder.meeting.unlink(missing_ok=True)
    started = [_start(folder, rank, count) for rank in range(1, count)]
    for process in started:
        Thread(target=_watch, args=(process, is_over, folder, report), daemon=True).start()
    try:
        with distributed.joined(folder.meeting, 0, count, device):
            yield
    except RuntimeError as error:  # so looks a connection to a partner that has ended
        word = _left_word(folder)
        if word is None or is_gpu_out_of_memory(error):
            raise
        raise word from error
    finally:
        is_over.set()
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def leaving_word(folder: Folder) -> Iterator[None]:
    """For a partner: too little GPU memory inside the block is written down for the first process."""
    try:
        yield
    except (RuntimeError, OutOfGpuMemory) as error:
        if isinstance(error, OutOfGpuMemory) or is_gpu_out_of_memory(error):
            message, may_fit = str(error), isinstance(error, OutOfGpuMemory)
            aside = folder.word.with_suffix(f".{os.getpid()}")
            aside.write_text(json.dumps({"message": message, "may_fit": may_fit}))
            os.replace(aside, folder.word)
        raise


def _left_word(folder: Folder) -> Exception | None:
    """Return the error that a rank left before it ended, or None."""
    if not folder.word.exists():
        return None
    word = json.loads(folder.word.read_text())
    return OutOfGpuMemory(word["message"], "batch_size") if word["may_fit"] else torch.OutOfMemoryError(word["message"])


def _start(folder: Folder, rank: int, count: int) -> subprocess.Popen[bytes]:
    command = python(_PROGRAM, str(folder.root), str(rank), str(count), str(os.getpid()))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - the command is ours


def _watch(process: subprocess.Popen[bytes], is_over: Event, folder: Folder, report: Report) -> None:
    if process.wait() and not is_over.is_set():
        log.error("a partner ended with %d; so do we", process.returncode)
        if word := _left_word(folder):
            what = failure(word)
            report.failed(what.code, what.message, what.param, retryable=what.retryable)
        os._exit(1)
