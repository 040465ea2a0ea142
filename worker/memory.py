"""Whether the kernel has killed for want of memory, by its own count."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

EVENTS = Path("/sys/fs/cgroup/memory.events")


def oom_kills(events: Path = EVENTS) -> int:
    """How many processes of this container were killed so far; 0 where the kernel does not tell."""
    with suppress(OSError, ValueError):
        return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])
    return 0
