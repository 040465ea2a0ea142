"""Measure the free memory of this machine or container; engines give way to training when it is short."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

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
