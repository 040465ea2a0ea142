"""System-call filters (seccomp) that apply permanently to a process and to everything that it starts.

A filter lists forbidden calls, because GPU libraries use too many calls for a list of allowed ones. Calls with another
architecture's numbers are always refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable

from spard.isolation import kernel

# Numbers on x86_64 and on aarch64; None: the call does not exist.
_NUMBERS: dict[str, tuple[int | None, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SPACES = frozenset(
    (
        "chroot", "clone3", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount",
        "open_tree", "pivot_root", "umount2", "unshare",
    )
)  # fmt: skip
_ARGUED = frozenset(("clone", "socket"))  # refused depending on their arguments
ALWAYS = frozenset(_NUMBERS) - _SPACES - _ARGUED  # never needed by training or computing
_NEW_SPACES = (
    kernel.NEW_USER
    | kernel.NEW_FILES
    | kernel.NEW_PROCESSES
    | kernel.NEW_NETWORK
    | kernel.NEW_IPC
    | kernel.NEW_NAME
    | 0x02000000  # CLONE_NEWCGROUP
)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data`
_KINDS = 0xF  # mask of socket types without flags
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_SET_SECCOMP, _FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def is_known() -> bool:
    """Return True if the system-call numbers of this machine's architecture are known."""
    return os.uname().machine in _MACHINES


def install(families: Iterable[int] | None, *, may_make_namespaces: bool, datagrams: bool = True) -> None:
    """Filter this process from now on.

    `families` are the allowed socket families (None: all). `datagrams=False` forbids internet sockets other than
    streams. Raises `OSError` if the kernel refuses.
    """
    kernel.forbid_new_privileges()
    code = program(families, may_make_namespaces=may_make_namespaces, datagrams=datagrams)
    wanted = _Program(len(code) // 8, code)
    kernel.prctl("seccomp", _SET_SECCOMP, _FILTER, ctypes.byref(wanted))


def program(families: Iterable[int] | None, *, may_make_namespaces: bool, datagrams: bool = True) -> bytes:
    """Return the filter as BPF instructions."""
    place, machine = _MACHINES[os.uname().machine]
    refuse = _step(_RETURN, _REFUSE | errno.EPERM)
    lines = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, machine, 1, 0), refuse, _step(_LOAD, _NUMBER)]
    if place == 0:
        # x32 calls have the same architecture but other numbers, which bypass the rules below.
        lines += [_step(_AT_LEAST, _X32, 0, 1), refuse]

    def add_rule(name: str, *then: bytes) -> None:
        number = _NUMBERS[name][place]
        if number is not None:
            lines.extend([_step(_EQUAL, number, 0, len(then)), *then])

    for name in sorted(ALWAYS):
        add_rule(name, refuse)
    if not may_make_namespaces:
        for name in sorted(_SPACES - {"clone3"}):
            add_rule(name, refuse)
        add_rule(
            "clone3", _step(_RETURN, _REFUSE | errno.ENOSYS)
        )  # makes libc fall back to `clone`, whose flags a filter can read
        allow = _step(_RETURN, _ALLOW)
        add_rule("clone", _step(_LOAD, _FIRST), _step(_ANY_OF, _NEW_SPACES, 0, 1), refuse, allow)
    if families is not None:
        allowed = list(families)
        checks = [_step(_EQUAL, family, len(allowed) - i, 0) for i, family in enumerate(allowed)]
        kinds = [] if datagrams else _streams_alone(refuse)
        add_rule("socket", _step(_LOAD, _FIRST), *checks, refuse, *kinds, _step(_RETURN, _ALLOW))
    return b"".join([*lines, _step(_RETURN, _ALLOW)])


def _streams_alone(refuse: bytes) -> list[bytes]:
    """Return instructions that refuse internet sockets other than streams; the family is already loaded."""
    return [
        _step(_EQUAL, socket.AF_INET, 1, 0),
        _step(_EQUAL, socket.AF_INET6, 0, 4),
        _step(_LOAD, _SECOND),
        _step(_AND, _KINDS),
        _step(_EQUAL, socket.SOCK_STREAM, 1, 0),
        refuse,
    ]


def _step(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)
