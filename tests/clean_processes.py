"""Clean processes that tests of whole runs use one after the other, since loading transformers and PEFT takes seconds.

`tests/spard/test_proof.py` opens `CleanProcess` itself, and so does each child of a worker and each `spard` command.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pytest

from spard.pipeline import library
from spard.release.proof import CleanProcess, ProofResult
from worker import pipeline


class CleanProcessPool:
    """Holds one process that waits for its next question, with the environment that it was started in."""

    def __init__(self) -> None:
        self._idle: tuple[subprocess.Popen[bytes], IO[bytes], Mapping[str, str]] | None = None

    def take(self, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], IO[bytes]] | None:
        """Return the process that waits, if it still lives and was started in this environment."""
        if self._idle is None or self._idle[0].poll() is not None or self._idle[2] != environment:
            return None
        (process, output, _), self._idle = self._idle, None
        return process, output

    def give_back(self, process: subprocess.Popen[bytes], output: IO[bytes], environment: Mapping[str, str]) -> None:
        """Let a process wait for the next run, in place of the one that waited."""
        self.close()
        self._idle = process, output, environment

    def close(self) -> None:
        """End the process that waits."""
        if self._idle is not None:
            process, output, _ = self._idle
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            output.close()
            self._idle = None

    def open(self) -> CleanProcess:
        """Return what `CleanProcess()` would, with the process that waits, if any."""
        return _PooledCleanProcess(self)


class _PooledCleanProcess(CleanProcess):
    """Gives its process back at its end, unless it died or was left with a question that it has not answered."""

    def __init__(self, pool: CleanProcessPool) -> None:
        self._pool, self._answers = pool, True
        self._environment = _environment()
        if (waiting := pool.take(self._environment)) is None:
            super().__init__()
        else:
            self._process, output = waiting
            self._output = cast(Any, output)

    def __exit__(self, *exc: object) -> None:
        if self._answers and self._process is not None and self._process.poll() is None:
            self._pool.give_back(self._process, self._output, self._environment)
        else:
            super().__exit__(*exc)

    def see(self, ask: Mapping[str, Any], go_on: Callable[[], None]) -> ProofResult:
        """Remember whether the question was answered: a run may be stopped while it waits."""
        self._answers = False
        seen = super().see(ask, go_on)
        self._answers = True
        return seen


_WITHOUT_EFFECT = ("PYTEST_CURRENT_TEST", "PYTHONPATH", "VLLM_FAKE_CALLS", "VLLM_FAKE_FAULT")  # once it has started


def _environment() -> dict[str, str]:
    """Return what a process that is started now would inherit: its variables and its working directory."""
    variables = {name: value for name, value in os.environ.items() if name not in _WITHOUT_EFFECT}
    return variables | {"": str(Path.cwd())}


@contextmanager
def pooled_clean_processes() -> Iterator[CleanProcessPool]:
    """Have runs in this process, by the library and by a worker's pipeline, prove adapters by one process."""
    pool = CleanProcessPool()
    with pytest.MonkeyPatch.context() as patch:
        for module in (library, pipeline):
            patch.setattr(module, "CleanProcess", pool.open)
        yield pool
    pool.close()
