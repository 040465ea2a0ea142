"""Detect if the kernel's out-of-memory killer ended one of our processes, on a host or inside a unit or container.

It reads the counters of this process's own cgroup and of its ancestors, in cgroup versions 1 and 2. `oom_kill` counts
the processes of a cgroup that an out-of-memory killer has ended; `oom` (version 2) counts how often the cgroup reached
its limit. A kill without a reached limit means that the machine's own memory was exhausted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

_V2, _V1 = "cgroup2", "cgroup"
_EVENTS = {_V2: "memory.events", _V1: "memory.oom_control"}
_PEAKS = {_V2: ("memory.peak", "memory.max"), _V1: ("memory.max_usage_in_bytes", "memory.limit_in_bytes")}


class Memory(StrEnum):
    """The memory whose exhaustion caused a kill: the worker's own limit, or the whole machine."""

    limit = "limit"  # the memory that this worker may use
    machine = "machine"  # the memory of the whole machine, whoever used it


@dataclass(frozen=True, slots=True)
class Kills:
    """Counters at one moment.

    own       kills in our own cgroup or below it
    above     kills in any cgroup above, or on the whole machine where no cgroup can be read
    at_limit  how often our own cgroup, or one above, reached its own limit
    """

    own: int = 0
    above: int = 0
    at_limit: int = 0


@dataclass(frozen=True, slots=True)
class _Group:
    folder: Path
    kind: str


class MemoryKills:
    """Counts out-of-memory kills around this process.

    `proc` is the mount point of procfs, and `root` the folder in front of the mount points that it lists.

        kills = (memory := MemoryKills()).read()
        ...  # a child ends by SIGKILL
        memory.memory_at_kill(kills)  # Memory.limit, Memory.machine or None
    """

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/")) -> None:
        self._proc = proc
        self._groups = _groups(proc, root)

    def read(self) -> Kills:
        """Return the counters now; 0 where the kernel does not report one."""
        found = [_numbers(group.folder / _EVENTS[group.kind]) for group in self._groups]
        known = [numbers for numbers in found if "oom_kill" in numbers]
        if not known:
            return Kills(above=_numbers(self._proc / "vmstat").get("oom_kill", 0))
        own = found[0].get("oom_kill", 0)
        return Kills(own, max(each["oom_kill"] for each in known), max(each.get("oom", 0) for each in known))

    def memory_at_kill(self, before: Kills) -> Memory | None:
        """Return the memory that was exhausted if there was a kill since `before`; None if there was no kill."""
        now = self.read()
        if now.own <= before.own and now.above <= before.above:
            return None
        if now.at_limit > before.at_limit or (now.own > before.own and self._is_at_limit()):
            return Memory.limit
        return Memory.machine

    def describe(self) -> str:
        """Return the peak and the limit of each cgroup in MB, from our own upward, for the log."""
        told = []
        for group in self._groups:
            peak, limit = (_number(group.folder / name) for name in _PEAKS[group.kind])
            if peak is not None:
                of = "no limit" if limit is None else f"{limit >> 20} MB"
                told.append(f"{group.folder.name or '/'}: peak {peak >> 20} MB of {of}")
        return "; ".join(told)

    def _is_at_limit(self) -> bool:
        """Return True if a cgroup's peak use equals its limit; version 1 has no counter for reaching the limit."""
        for group in self._groups:
            peak, limit = (_number(group.folder / name) for name in _PEAKS[group.kind])
            if peak is not None and limit is not None and peak >= limit:
                return True
        return False


def _groups(proc: Path, root: Path) -> list[_Group]:
    """Return the memory cgroups of this process that are visible here, its own first, then its ancestors."""
    mounts = _mounts(proc / "self/mountinfo")
    for kind in (_V1, _V2):  # where both are mounted, version 1 has the memory controller if it has one at all
        path = _path(proc / "self/cgroup", kind)
        for of, within, mount in mounts:
            if of == kind and path is not None:
                top = root / mount.relative_to("/")
                return _upward(top, top / _relative(path, within), kind)
    return []


def _upward(top: Path, own: Path, kind: str) -> list[_Group]:
    if not own.is_dir():  # the cgroups of a container may be mounted without what the path begins with
        own = top
    found = [own, *own.parents]
    return [_Group(folder, kind) for folder in found[: found.index(top) + 1]]


def _relative(path: PurePosixPath, within: PurePosixPath) -> PurePosixPath:
    """Return a cgroup's path relative to a mount of the subtree `within`; a path outside becomes the mount itself."""
    if ".." in path.parts or not path.is_relative_to(within):
        return PurePosixPath()
    return path.relative_to(within)


def _mounts(path: Path) -> list[tuple[str, PurePosixPath, PurePosixPath]]:
    """Return (kind, root within the hierarchy, mount point) of each cgroup mount that may have a memory controller."""
    found = []
    for line in _lines(path):
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 3 or rest[0] not in (_V1, _V2):
            continue
        if rest[0] == _V2 or "memory" in rest[2].split(","):
            found.append((rest[0], PurePosixPath(fields[3]), PurePosixPath(fields[4])))
    return found


def _path(path: Path, kind: str) -> PurePosixPath | None:
    for line in _lines(path):
        number, controllers, where = (*line.split(":", 2), "", "")[:3]
        if (kind == _V2 and number == "0" and not controllers) or (kind == _V1 and "memory" in controllers.split(",")):
            return PurePosixPath(where)
    return None


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []


def _numbers(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none or it means "no limit" (`max`, or a value above 2**62)."""
    line = next(iter(_lines(path)), "")
    return int(line) if line.isdecimal() and int(line) < 1 << 62 else None
