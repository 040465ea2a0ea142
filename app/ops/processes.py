"""Helpers for our processes: a child's command, environment, limits and death with its parent; the free memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_HARMLESS = frozenset({"HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ"})
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs the installed copy of one of our modules.

    `-P` keeps the current folder off the module path: a folder there may hold packages of the same names (CWE-427).
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def safe_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a module path that excludes the current folder, also for grandchildren."""
    absolute = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(each)]
    rest = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    path = {"PYTHONPATH": os.pathsep.join(absolute)} if absolute else {}
    return rest | path | {"PYTHONSAFEPATH": "1"}


def keyless_environment(fixed: Mapping[str, str]) -> dict[str, str]:
    """Return an environment, for processes that parse customers' data, with harmless variables and `fixed` only."""
    return safe_path({name: value for name, value in os.environ.items() if name in _HARMLESS} | dict(fixed))


def end_with_parent(parent: int, number: signal.Signals) -> bool:
    """Make the kernel send this process a signal when the thread that started it ends; return False if it has ended.

    Only on Linux; elsewhere children survive a killed parent. The setting survives `exec`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent's thread ends; a child calls this first."""
    if not end_with_parent(parent, signal.SIGKILL):
        os._exit(1)


def limit_memory(most: int) -> None:
    """Limit this process's address space to `most` bytes; allocations beyond it fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def limit_cpu(more_s: float) -> None:
    """Make the kernel end this process after `more_s` further seconds of CPU time."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(own.ru_utime + own.ru_stime + more_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_mb() -> int | None:
    """Return the available main memory in MiB, within the container's limit; None if the system does not report it."""
    found = [each for each in (_of_machine(), _of_container()) if each is not None]
    return min(found) if found else None


def _of_machine() -> int | None:
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) >> 10
    return None


def _of_container() -> int | None:
    with suppress(OSError, KeyError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])
        return (limit - used) >> 20
    return None
