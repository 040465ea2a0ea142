"""Linux system calls without a Python function, by ctypes; each raises `OSError` with the call's name."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

NEW_FILES, NEW_NAME, NEW_IPC = 0x00020000, 0x04000000, 0x08000000  # CLONE_NEWNS, _NEWUTS, _NEWIPC
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
NO_SUID, NO_DEVICES, NO_EXEC = 2, 4, 8  # mount flags; MS_... and MOUNT_ATTR_... have equal values
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 1 << 18
READ_ONLY = 1

_PARENT_DEATH_SIGNAL, _DUMPABLE, _DROP_BOUND, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38  # prctl
_AMBIENT, _CLEAR_ALL = 47, 4
_MOUNT_SETATTR, _AT_RECURSIVE, _HERE = 442, 0x8000, -100
_DETACH = 2
_CAPABILITIES_3 = 0x20080522
_LAST_CAPABILITY = 63
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NOBODY = 65534
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, result: int) -> int:
    """Return the result of a C library call; raise `OSError` if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """Make a system call without a libc wrapper; raise `OSError` if it fails."""
    return call(name, _libc.syscall(ctypes.c_long(number), *arguments))


def prctl(name: str, option: int, *values: object) -> int:
    """Call prctl, with zeros for missing arguments; raise `OSError` if it fails."""
    padded = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in (*values, 0, 0, 0, 0)[:4]]
    return call(name, _libc.prctl(option, *padded))


def unshare(flags: int) -> None:
    """Move this process into its own namespaces; raise `OSError` if the kernel refuses."""
    call("unshare", _libc.unshare(flags))


def enter_user_namespace(more: int) -> None:
    """Enter a user namespace, and the others in `more`, in which this user keeps its id.

    Root becomes nobody: a process without capabilities may not create a namespace in which root is mapped.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER | more)
    users, groups = (f"{number or _NOBODY} {number} 1" for number in (user, group))
    for name, line in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system; raise OSError if the kernel refuses."""

    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    done = _libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(options))
    call(f"mount {target}", done)


def restrict_mount(path: str, attributes: int, *, with_those_below: bool = True) -> None:
    """Set attributes on a mount and, by default, on all mounts below it."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    how, size = _AT_RECURSIVE if with_those_below else 0, ctypes.sizeof(wanted)
    syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _HERE, os.fsencode(path), how, wanted, size)


def change_root(folder: str | int, keep: str | None = None) -> None:
    """Make a mounted folder the root of all processes in this mount namespace, and unmount the old root.

    `folder` is a path or a descriptor. With `keep`, a folder below the new root, the old root stays mounted there.
    """
    os.chdir(folder)
    below = os.fsencode(keep or ".")
    syscall("pivot_root", _PIVOT_ROOT[os.uname().machine], b".", below)
    if keep is None:
        call("umount", _libc.umount2(b".", _DETACH))
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop all capabilities permanently."""
    for number in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_DROP_BOUND, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break  # no further capability, or no permission
    _libc.prctl(_AMBIENT, ctypes.c_ulong(_CLEAR_ALL), 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    call("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def forbid_new_privileges() -> None:
    """Forbid this process and its children to gain privileges by executing a program."""
    prctl("no_new_privs", _NO_NEW_PRIVILEGES, 1)


def die_with_parent(signal: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    prctl("pdeathsig", _PARENT_DEATH_SIGNAL, signal)


def take_up_orphans() -> None:
    """Make this process the parent of its descendants' orphans, instead of the init process."""
    prctl("child_subreaper", _SUBREAPER, 1)


def hide_memory() -> None:
    """Hide this process's memory, environment and descriptors from the user's other processes; disable core dumps."""
    if sys.platform == "linux":
        prctl("dumpable", _DUMPABLE, 0)


def enable_loopback() -> None:
    """Enable the loopback interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asks = struct.pack("16sh14x", b"lo", 0)
        name, flags = struct.unpack("16sh14x", fcntl.ioctl(asked, _GET_FLAGS, asks))
        fcntl.ioctl(asked, _SET_FLAGS, struct.pack("16sh14x", name, flags | _UP))


def name_host(name: str) -> None:
    """Set the host name in this process's own namespace."""
    text = name.encode()
    call("sethostname", _libc.sethostname(text, len(text)))
