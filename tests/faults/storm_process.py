"""What processes of a service in a storm have in common: a log in a file, a disk that can be full, scaled timers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from app.db import session
from tests.faults import full_disk

_LOCK_WAIT = 30 / 90  # of a lease, as by default
FULL = "full"


def prepare(folder: Path, environment: Mapping[str, str], lease_s: float) -> None:
    """Prepare this process; its disk is full while `folder` has a file `full`."""
    os.setsid()
    os.environ.update(environment)
    log = os.open(folder / f"log-{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    session.LOCK_WAIT_ALONE_S = _LOCK_WAIT * lease_s
    full_disk.fill_process(folder / FULL)
