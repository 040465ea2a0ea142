"""Folders that all processes of one run of the tests use."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def run_folder(request: pytest.FixtureRequest, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run, which the first process that needs it makes while the others wait.

    It is for what takes long to make and is the same in every process. Copy it: a test may change its own copy only.
    """
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    own = factory.getbasetemp()
    is_shared = hasattr(request.config, "workerinput")  # in a process of xdist, whose parent folder is the run's
    folder = (own.parent if is_shared else own) / f"once-{name}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that failed to make it
            make(unfinished)
            unfinished.rename(folder)
    return folder
