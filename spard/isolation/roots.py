"""Private roots: a tree in memory that contains a few paths of the real root and nothing else.

Every path keeps its location, so modules and libraries found earlier are still found. A root that another one follows
is entered by `enter_first`, and the next one by `enter_next`: paths outside a private root cannot be mounted into it,
so the old root stays mounted below an empty folder that covers it. It can be reached only by its descriptor; without
capabilities nobody can remove the cover, nor in a nested namespace, where such mounts are locked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from spard.isolation import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCELERATORS = ("nvidia", "kfd", "dri", "dxg")  # prefixes of device names
_TREE_MB = 16
_OF_THE_MACHINE = ("sys", "sysrq-trigger", "irq", "bus")  # below /proc: writable for root's user id
_SHARED = "/dev/shm"  # noqa: S108 - mounted by us
_BEFORE = ".before"  # in a private root that another one follows: the covered mount point of the old root
_FIXED = kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES


def accelerators() -> list[str]:
    """Return the device files of this machine's GPUs."""
    return [f"/dev/{name}" for name in sorted(os.listdir("/dev")) if name.startswith(_ACCELERATORS)]


def enter(
    readable: Iterable[str], writable: Iterable[tuple[str, str]], devices: Iterable[str], *, with_processes: bool
) -> None:
    """Build a private root and enter it with all processes of this mount namespace.

    `writable` are pairs (current path, path in the private root). `with_processes` adds `/proc` (of the namespace's own
    processes, if the kernel allows) and `/sys`, which GPU libraries read.
    """
    stage = _build_tree(readable, writable, devices, with_processes=with_processes)
    kernel.restrict_mount(stage, _FIXED, with_those_below=False)
    kernel.change_root(stage)


def enter_first(readable: Iterable[str], fresh: Iterable[str], devices: Iterable[str]) -> int:
    """Enter a private root and return a descriptor of the old one; `fresh` are new empty writable folders."""
    before = _root()
    stage = _build_tree(readable, [("", path) for path in fresh], devices, with_processes=True)
    os.mkdir(f"{stage}/{_BEFORE}")
    kernel.restrict_mount(stage, _FIXED, with_those_below=False)
    kernel.change_root(stage, keep=_BEFORE)
    kernel.mount("none", f"/{_BEFORE}", "tmpfs", _FIXED, "mode=755,size=4k")
    return before


def enter_next(
    before: int, readable: Iterable[str], writable: Iterable[tuple[str, str]], devices: Iterable[str]
) -> None:
    """Enter another private root, built from paths of the real root; `before` is a descriptor of the real root."""
    here = _root()
    os.fchdir(before)
    os.chroot(".")
    stage = _build_tree(readable, writable, devices, with_processes=True)
    kernel.restrict_mount(stage, _FIXED, with_those_below=False)
    there = os.open(stage, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fchdir(here)
    os.chroot(".")
    kernel.change_root(there)
    for each in (before, here, there):
        os.close(each)


def _root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _build_tree(
    readable: Iterable[str],
    writable: Iterable[tuple[str, str]],
    devices: Iterable[str],
    *,
    with_processes: bool,
) -> str:
    """Build the tree and return its mount point.

    A writable source that differs from its target is created if missing; the source "" is an empty folder in memory.
    """
    read, write = list(readable), list(writable)
    for source in (source for source, target in write if source not in ("", target)):
        os.makedirs(source, exist_ok=True)
    sources = [*read, *(source for source, _ in write if source), "/dev", "/proc", "/sys"]
    stage = _free_folder(sources)
    kernel.mount("tmpfs", stage, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, f"mode=755,size={_TREE_MB}m")
    wanted = [(path, path, True) for path in read] + [(source, target, False) for source, target in write]
    for source, target, is_fixed in sorted(wanted, key=lambda each: each[1].count("/")):
        if source:
            _bind(source, stage + target, kernel.READ_ONLY if is_fixed else 0)
        else:
            _add_fresh(stage + target)
    for device in devices:
        _bind(device, stage + device, None)
    if with_processes:
        _add_processes(stage)
    return stage


def shows_own_processes() -> bool:
    """Try to mount a `/proc` of this namespace's own processes; return False where masks forbid that."""
    try:
        kernel.mount("proc", "/proc", "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)
    except PermissionError:
        return False
    return True


def _add_processes(stage: str) -> None:
    _bind("/proc", f"{stage}/proc", kernel.NO_EXEC)  # writable, because nested namespaces are set up by writing there
    for name in _OF_THE_MACHINE:
        _bind(f"{stage}/proc/{name}", f"{stage}/proc/{name}", kernel.READ_ONLY)
    _bind("/sys", f"{stage}/sys", kernel.READ_ONLY)
    os.makedirs(stage + _SHARED)
    kernel.mount("tmpfs", stage + _SHARED, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES)
    os.symlink("/proc/self/fd", f"{stage}/dev/fd")


def _add_fresh(target: str) -> None:
    os.makedirs(target, exist_ok=True)
    kernel.mount("tmpfs", target, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, f"mode=700,size={_TREE_MB}m")


def _bind(source: str, target: str, attributes: int | None) -> None:
    """Mount a path at another one; a link is copied as a link. `attributes` None means a device file."""
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
    """Return a top-level folder that contains no source: mounting there hides nothing that is needed."""
    tops = {"/" + each.split("/")[1] for each in sources}
    for name in sorted(os.listdir("/")):
        path = f"/{name}"
        if path not in tops and not os.path.islink(path) and os.path.isdir(path):
            return path
    raise OSError("there is no folder at the root of the file system to build a private root in")
