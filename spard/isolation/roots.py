"""A private root: a tree in memory with a few paths of the real one in it, and nothing else of it.

Every path is where it was, so that what was found before, as modules and libraries, is found there still.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from spard.isolation import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCELERATORS = ("nvidia", "kfd", "dri", "dxg")  # how the names of their devices begin
_TREE_MB = 16
_OF_THE_MACHINE = ("sys", "sysrq-trigger", "irq", "bus")  # below /proc: root's number may write there
_SHARED = "/dev/shm"  # noqa: S108 - mounted by us


def accelerators() -> list[str]:
    """Return the devices of GPUs that there are."""
    return [f"/dev/{name}" for name in sorted(os.listdir("/dev")) if name.startswith(_ACCELERATORS)]


def enter(
    readable: Iterable[str], writable: Iterable[tuple[str, str]], devices: Iterable[str], *, with_processes: bool
) -> None:
    """Make the private root and enter it with all processes of this mount namespace.

    `writable` are pairs of a path as it is now and as it is to be. `with_processes`: with `/proc`, of the own ones
    where the kernel allows that, and with `/sys`, which libraries for GPUs read.
    """
    read, write = list(readable), list(writable)
    sources = [*read, *(source for source, _ in write), "/dev", "/proc", "/sys"]
    stage = _free_folder(sources)
    kernel.mount("tmpfs", stage, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, f"mode=755,size={_TREE_MB}m")
    wanted = [(path, path, True) for path in read] + [(source, target, False) for source, target in write]
    for source, target, is_fixed in sorted(wanted, key=lambda each: each[1].count("/")):
        _bind(source, stage + target, kernel.READ_ONLY if is_fixed else 0)
    for device in devices:
        _bind(device, stage + device, None)
    if with_processes:
        _add_processes(stage)
    fixed = kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES
    kernel.restrict_mount(stage, fixed, with_those_below=False)
    kernel.change_root(stage)


def shows_own_processes() -> bool:
    """Whether this process may mount a `/proc` of its own processes; where parts of it are masked it may not."""
    try:
        kernel.mount("proc", "/proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
    except PermissionError:
        return False
    return True


def _add_processes(stage: str) -> None:
    _bind("/proc", f"{stage}/proc", kernel.NO_EXEC)  # a namespace in this one is set up by writing there
    for name in _OF_THE_MACHINE:
        _bind(f"{stage}/proc/{name}", f"{stage}/proc/{name}", kernel.READ_ONLY)
    _bind("/sys", f"{stage}/sys", kernel.READ_ONLY)
    os.makedirs(stage + _SHARED)
    kernel.mount("tmpfs", stage + _SHARED, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES)
    os.symlink("/proc/self/fd", f"{stage}/dev/fd")


def _bind(source: str, target: str, attributes: int | None) -> None:
    """Show a path at another one; as a link where it is one, so that it leads to the same path. None: a device."""
    try:
        found = os.lstat(source)
    except FileNotFoundError:
        return
    if os.path.lexists(target) and not os.path.isdir(target) and not os.path.isfile(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(found.st_mode):
        if not os.path.lexists(target):
            os.symlink(os.readlink(source), target)
        return
    if stat.S_ISDIR(found.st_mode):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, kernel.BIND | kernel.RECURSIVE)
    more = kernel.NO_SUID if attributes is None else attributes | kernel.NO_SUID | kernel.NO_DEVICES
    kernel.restrict_mount(target, more)


def _free_folder(sources: Iterable[str]) -> str:
    """Return a folder at the top that no source lies in: what is mounted there hides nothing that is needed."""
    tops = {"/" + each.split("/")[1] for each in sources}
    for name in sorted(os.listdir("/")):
        path = f"/{name}"
        if path not in tops and not os.path.islink(path) and os.path.isdir(path):
            return path
    raise OSError("there is no folder at the root of the file system to build a private root in")
