from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from app.move_in.ledger import open_read_only
from tests.app.move_in.openai_stub import Fault, Stub

# All of a move but its comparison, in one process; steps that ended well before are not repeated.
MOVE = """
import sys
from pathlib import Path
from threading import Lock
from spard.commands import main

folder = sys.argv[1]
for name, *rest in (["read"], ["golden", "--replies", "2"], ["file", "--model", "gpt-old=lab"]):
    done = Path(f"{folder}.{name}")
    if not done.exists():
        try:
            main(["move-in", name, folder, *rest])
        except SystemExit as ended:
            if ended.code:
                raise
        done.touch()
"""


STEPS = [("GET .*/content", 2), ("POST /chat/completions", 5), ("POST /files", 1), ("POST /fine_tuning/jobs", 1)]


class Killer:
    """Kills the process that asks, at the given request of each kind in turn; the request is done all the same."""

    def __init__(self) -> None:
        self.steps, self.pid, self.lock = list(STEPS), 0, Lock()

    def fault(self, kind: str) -> Fault:
        def strike() -> str | None:
            with self.lock:
                if not self.steps or self.steps[0][0] != kind:
                    return None
                left = self.steps[0][1] - 1
                self.steps[0] = (kind, left)
                if left:
                    return None
                os.kill(self.pid, signal.SIGKILL)
                del self.steps[0]
                return "lost"

        return strike


def test_a_move_that_is_killed_at_each_of_its_steps_loses_and_doubles_nothing(
    account: Stub, service: Stub, folder: Path
) -> None:
    killer = Killer()
    account.page = 100
    account.faults = service.faults = {kind: killer.fault(kind) for kind, _ in STEPS}
    assert list(_runs(killer, folder)) == [-signal.SIGKILL] * len(STEPS) + [0]

    assert len(service.jobs) == 1
    assert sorted(service.contents.values()) == sorted(account.contents[key] for key in ("file-000", "file-001"))
    with open_read_only(folder) as ledger:
        assert len(ledger.all("golden")) == 8
        assert [ledger.get("filing", "ftjob-a")["job"]["id"]] == [*service.jobs]
        assert ledger.all("job") == account.jobs
    for key in ("file-000", "file-001", "file-002"):
        (path,) = (folder / "files").glob(f"{key}-*")
        assert path.read_bytes() == account.contents[key]


def _runs(killer: Killer, folder: Path) -> Iterator[int]:
    """The exit codes of runs, to the first that is 0."""
    while True:
        with subprocess.Popen([sys.executable, "-c", MOVE, str(folder)], stdout=subprocess.DEVNULL) as child:
            killer.pid = child.pid
        assert child.returncode in (0, -signal.SIGKILL)
        yield child.returncode
        if child.returncode == 0:
            return
