"""Finds the kind of isolation that this machine supports, and starts processes in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from spard.isolation import filters, landlock, reach
from spard.isolation.gate import Line, Order, Talks

Kind = Literal["namespaces", "landlock", "none"]

_ROOT = Path(__file__).parents[2]
_PROBE_S = 60.0
# Reads its folder, and prints True if it sees only its own processes.
_PROBE = """
import os, sys
os.listdir(sys.stdin.readline().strip())
print(sum(map(str.isdigit, os.listdir("/proc"))) < 9)
"""


@dataclass(frozen=True, slots=True)
class Walls:
    """The isolation that this machine supports; `missing` describes the gaps for the administrator."""

    kind: Kind
    missing: tuple[str, ...] = ()

    @property
    def are_whole(self) -> bool:
        """True if nothing is missing."""
        return not self.missing


@cache
def find_walls() -> Walls:
    """Return the isolation that works on this machine, found by trying; cached for the process."""
    if sys.platform != "linux" or not filters.is_known():
        return Walls("none", ("all isolation (it needs Linux on x86_64 or aarch64)",))
    said, why = _probe_walls("namespaces")
    if said == "True":
        return Walls("namespaces")
    if said:
        return Walls("namespaces", ("a /proc of its own processes (masked in this container; names are seen)",))
    missing = [f"user namespaces with mounts ({why})"]
    if landlock.version() and _probe_walls("landlock")[0]:
        if not landlock.scopes_signals():
            missing.append("signals kept inside (Landlock 6)")
        return Walls("landlock", (*missing, "a network of its own where several GPUs train one job"))
    return Walls("none", (*missing, "Landlock"))


def isolated_command(walls: Walls, command: Sequence[str], *, talks: Talks = "alone") -> list[str]:
    """Return a command line that runs `command` in isolation; `talks` are the allowed socket peers.

    The command gets its parent's process id as its last argument, and reads its folder from standard input after `line`
    was written there.
    """
    order: Order = {"walls": walls.kind, "parent": os.getpid(), "talks": talks}
    return [*python("spard.isolation.gate"), json.dumps(order), *command]


def line(folder: Path, readable: Iterable[str], writable: Iterable[str], hidden: Iterable[str]) -> bytes:
    """Return the line that completes the isolation and names the folder; no path in `hidden` is readable."""
    return _line(None, str(folder), readable, writable, hidden)


def ahead(told: str, readable: Iterable[str], hidden: Iterable[str]) -> bytes:
    """Return the line for a process that has no folder yet, which limits it to these paths until then."""
    return _line(told, "", readable, (), hidden)


def _line(
    told: str | None, folder: str, readable: Iterable[str], writable: Iterable[str], hidden: Iterable[str]
) -> bytes:
    line: Line = {
        "ahead": told,
        "folder": folder,
        "listed": reach.checkouts(),
        "readable": [*reach.exclude_hidden(reach.program(), hidden), *readable],
        "writable": list(writable),
    }
    return json.dumps(line).encode() + b"\n"


def python(module: str) -> list[str]:
    """Return the start of a command that runs `main` of one of our modules, without installed packages."""
    boot = f"import sys; sys.path.append({str(_ROOT)!r}); from {module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", boot]


def _probe_walls(kind: Kind) -> tuple[str, str]:
    """Return the probe's output in an isolation of this kind, and the reason if there is none."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603 - our own text
            isolated_command(Walls(kind), [sys.executable, "-I", "-S", "-c", _PROBE]),
            input=line(Path(os.path.realpath(folder)), (), (), ()),
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    why = done.stderr.decode(errors="replace").strip().splitlines()
    return done.stdout.decode(errors="replace").strip(), why[-1] if why else "refused"
