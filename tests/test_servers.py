"""The test servers themselves: a test run that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

WAIT_S = 120.0
RUN = """
import sys, time
from tests import servers
with getattr(servers, sys.argv[1])():
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder like /tmp: PostgreSQL's user may enter it, which it may not with pytest's own."""
    with tempfile.TemporaryDirectory(prefix="spard-killed-") as folder:
        os.chmod(folder, 0o1777)  # noqa: S103 - as /tmp is
        yield Path(folder)


@pytest.mark.parametrize("server", ["postgres", "redis", "moto", "rclone"])
def test_a_killed_test_run_leaves_no_server_and_no_file(server: str, folder: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}
    env |= {"TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", RUN, server], env=env, stdout=subprocess.PIPE) as run:
        assert run.stdout
        assert run.stdout.readline() == b"up\n"
        started = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGKILL)
    assert started
    _, alive = psutil.wait_procs(started, timeout=WAIT_S)
    assert (alive, _remaining_files(folder)) == ([], [])


def _remaining_files(folder: Path) -> list[Path]:
    deadline = time.monotonic() + WAIT_S
    while (left := list(folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
