"""The command line of instructor. Commands on jobs never return, so each is read until it has said what it is for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

from openai import OpenAI

from tests.clients.scripts.checks import MODEL, Check, place, tell, wait_until

PLACE = place()
PATIENCE_S = 120
client: Any = OpenAI()


def ask(*words: str) -> str:
    """What a command printed, once it has ended."""
    argv = [str(Path(sys.executable).with_name("instructor")), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def watching(*words: str) -> Iterator[Any]:
    """A command that goes on until it is stopped."""
    argv = [str(Path(sys.executable).with_name("instructor")), *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        stop = Timer(PATIENCE_S, process.kill)
        stop.start()
        try:
            yield process
        finally:
            stop.cancel()
            process.kill()


def read_match(process: Any, pattern: str) -> str:
    """The part of its output that fits, as soon as it is there."""
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(pattern, said):
            return found[1]
    raise AssertionError(f"it never said {pattern}: {said}")


@cache
def file() -> str:
    said = ask("files", "upload", str(PLACE.train), "--poll", "1")
    found = re.search(r"(file-\w+)", said)
    assert found, said
    return found[1]


def files() -> None:
    assert file() in ask("files", "list")


def status() -> None:
    ask("files", "status", file())


def _start(*words: str) -> str:
    with watching("jobs", *words, "--model", MODEL) as process:
        return read_match(process, r"created with ID:\s+(ftjob-\w+)")


def from_file() -> None:
    made = _start("create-from-file", str(PLACE.train), "--n-epochs", "2", "--model-suffix", "instructor")
    job = client.fine_tuning.jobs.retrieve(made)
    client.fine_tuning.jobs.cancel(made)
    assert job.hyperparameters.n_epochs == 2


@cache
def job() -> str:
    return _start("create-from-id", file())


def cancel() -> None:
    assert "cancelled successfully" in ask("jobs", "cancel", job())
    wait_until(lambda: client.fine_tuning.jobs.retrieve(job()).status == "cancelled", 60)


def delete() -> None:
    assert "deleted successfully" in ask("files", "delete", file())


CHECKS: dict[str, Check] = {
    "files upload": file,
    "files list": files,
    "files status": status,
    "jobs create-from-file": from_file,
    "jobs create-from-id": job,
    "jobs cancel": cancel,
    "files delete right after": delete,
}

if __name__ == "__main__":
    tell(CHECKS)
