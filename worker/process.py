"""The child process of a job: started before there is a job, fed one folder, listened to, and never outliving us.

A child runs in a session of its own with an environment that holds no secret but, if the judge needs one, its key. It
dies with its parent: the kernel kills it when the thread that started it ends, so that thread has to live on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, cast

import structlog

from app.settings import Settings
from worker.report import MAX_LINE, Message, parse

COMMAND = (sys.executable, "-m", "worker.child")
MAX_LOG_BYTES = 10_000_000  # of a job's child
_QUEUED = 1000  # messages; a child that is faster than the database waits in its pipe
_NAMES = frozenset({"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ"})
_PREFIXES = ("CUBLAS_", "CUDA_", "HF_", "LC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "TORCH")
_SECRET = frozenset({"HF_TOKEN"})
_FIXED = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait are five times slower on cores that others use
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Child:
    """One child process: warm until it is given a folder, heard until it ends, gone after `kill`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - the command is ours
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._messages: Queue[Message | None] = Queue(maxsize=_QUEUED)
        self._log = structlog.get_logger(__name__).bind(child=self.pid)
        self.is_over = False  # it has ended, and everything it said was received
        for read, stream in ((self._read, self._process.stdout), (self._drain, self._process.stderr)):
            Thread(target=read, args=(cast(IO[bytes], stream),), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """What it ended with; negative when a signal ended it."""
        return self._process.wait()

    def work(self, folder: Path, **ids: str | None) -> None:
        """Tell it which folder to work on; a child that has died meanwhile says so by being over.

        What it logs is logged with `ids`.
        """
        self._log = self._log.bind(**ids)
        with suppress(BrokenPipeError):
            self._stdin.write(f"{folder}\n".encode())
            self._stdin.flush()

    def receive(self, timeout_s: float) -> Message | None:
        """What it says next; None when it said nothing in time, or has ended."""
        if self.is_over:
            return None
        with suppress(Empty):
            message = self._messages.get(timeout=timeout_s)
            self.is_over = message is None
            return message
        return None

    def terminate(self) -> None:
        """Ask it to checkpoint and stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all it started, now; returns when it is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        while not self.is_over:
            self.receive(timeout_s=1)
        with suppress(BrokenPipeError):
            self._stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:  # else its number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(MAX_LINE):
                if message := parse(line):
                    self._messages.put(message)
                else:
                    self._log.warning("the child said what is no message", bytes=len(line))
        self._messages.put(None)

    def _drain(self, stream: IO[bytes]) -> None:
        """Its log becomes ours, up to a limit; the rest is read and dropped, so that it never blocks."""
        left = MAX_LOG_BYTES
        with stream:
            while line := stream.readline(MAX_LINE):
                if left > 0:
                    self._log.info("child", line=line.decode(errors="replace").rstrip())
                    left -= len(line)
                    if left <= 0:
                        self._log.warning("the child's log is too long; the rest is dropped")


def environment(settings: Settings) -> dict[str, str]:
    """What a child may know: where programs and models are, and how many threads it has."""
    passed = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    passed = {name: value for name, value in passed.items() if name not in _SECRET}
    passed |= _FIXED | {"OMP_NUM_THREADS": str(settings.worker_threads or max(1, (os.cpu_count() or 1) - 1))}
    if settings.worker_threads:
        passed["SPARD_WORKER_THREADS"] = str(settings.worker_threads)  # asked for, so it holds for small models too
    if settings.device == "cpu":
        passed["CUDA_VISIBLE_DEVICES"] = ""
    if settings.judge == "llm" and settings.judge_api_key:
        passed["SPARD_JUDGE_API_KEY"] = settings.judge_api_key.get_secret_value()
    return passed
