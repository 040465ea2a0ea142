"""Runs in one process of the tests share a clean process: one that is idle, alive and of the same variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryFile
from typing import IO

import pytest

from spard.pipeline import library
from spard.release import proof
from tests.clean_processes import CleanProcessPool, pooled_clean_processes


@pytest.fixture(autouse=True)
def light_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the clean process one that loads nothing and never answers."""
    monkeypatch.setattr(proof.CleanProcess, "_start", lambda self: start(self._output))


@pytest.fixture
def pool() -> Iterator[CleanProcessPool]:
    with pooled_clean_processes() as pool:
        yield pool


def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)


def open_process() -> proof.CleanProcess:
    """Open a clean process as a run does."""
    opened: proof.CleanProcess = vars(library)["CleanProcess"]()
    return opened


def pid_of_a_run() -> int:
    with open_process() as process:
        return process.start().pid


def test_the_next_run_takes_the_process_of_the_last(pool: CleanProcessPool) -> None:
    assert pid_of_a_run() == pid_of_a_run()


def test_two_runs_at_once_have_a_process_each(pool: CleanProcessPool) -> None:
    with open_process() as one, open_process() as other:
        assert one.start().pid != other.start().pid


def test_other_variables_are_another_process(pool: CleanProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pid_of_a_run()
    monkeypatch.setenv("HF_HOME", "elsewhere")
    assert pid_of_a_run() != before


def test_a_process_that_died_is_not_taken_again(pool: CleanProcessPool) -> None:
    with open_process() as process:
        started = process.start()
        os.kill(started.pid, 9)
        started.wait()
        gone = started.pid
    assert pid_of_a_run() != gone


def test_a_process_with_an_open_question_is_not_taken_again(pool: CleanProcessPool) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with open_process() as process:
        asked = process.start().pid
        with pytest.raises(KeyboardInterrupt):
            process.see({"device": "cpu"}, stop)
    assert pid_of_a_run() != asked


def test_nothing_is_left_at_the_end() -> None:
    before = vars(library)["CleanProcess"]  # a pool's too, if tests of whole runs run in the same process
    with pooled_clean_processes(), open_process() as process:
        started = process.start()
    assert started.returncode is not None
    assert vars(library)["CleanProcess"] is before


def test_a_pool_ends_the_process_that_another_replaces() -> None:
    pool = CleanProcessPool()
    outputs = [TemporaryFile(), TemporaryFile()]  # noqa: SIM115 - the pool closes them
    processes = [start(each) for each in outputs]
    for process, output in zip(processes, outputs, strict=True):
        pool.give_back(process, output, {})
    pool.close()
    assert [each.returncode for each in processes] == [-9, -9]
    assert all(each.closed for each in outputs)
