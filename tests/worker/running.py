"""Jobs' folders that are worked on without a worker: in this process, or in a child over several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.spard.parts import away
from tests.worker.shop import WAIT_S
from worker import pipeline
from worker.protocol import Report, parse
from worker.workdir import Folder


def run_here(folder: Folder) -> None:
    """Run a job's folder in this process; nobody hears its report."""
    with Path(os.devnull).open("wb") as nowhere:
        pipeline.run(folder, Report(nowhere.fileno()), lambda: False)


def last_told_by_child(folder: Folder) -> dict[str, Any] | None:
    """Run a job's folder in a child of its own; return the last message of it."""
    command = [sys.executable, "-m", "worker.child", str(os.getpid())]
    told = f"{folder.root}\n".encode()
    child = subprocess.run(command, input=told, stdout=subprocess.PIPE, timeout=WAIT_S, check=True)
    return parse(child.stdout.splitlines()[-1])


def assert_only_sharding_differs(alone: Folder, together: Folder) -> None:
    """Compare what one process left with what ranks left that had a part of the model each."""
    one, two = (load_file(folder.adapter / "adapter_model.safetensors") for folder in (alone, together))
    assert away([two[name] for name in one], one.values()) < 1e-2
    one, two = (json.loads(folder.safety.read_text()) for folder in (alone, together))
    assert two["recipe"].pop("sharding") == "full"
    assert one["recipe"].pop("sharding") == "none"
    for of_both in ("recipe", "base", "selected", "risky_rows", "replies"):
        assert_same(one[of_both], two[of_both])


def assert_same(one: object, two: object) -> None:
    """Compare two JSON documents; numbers may differ in their last digits, as sums over other threads do."""
    if isinstance(one, dict) and isinstance(two, dict):
        assert one.keys() == two.keys()
        for name in one:
            assert_same(one[name], two[name])
    elif isinstance(one, list) and isinstance(two, list):
        assert len(one) == len(two)
        for each, other in zip(one, two, strict=True):
            assert_same(each, other)
    elif isinstance(one, float) and isinstance(two, float):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    else:
        assert one == two
