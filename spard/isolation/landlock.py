"""Landlock: a process gives up all files but those below some folders, and signals and sockets beyond itself."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from spard.isolation import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_SCOPED_SINCE, _NETWORK_SINCE = 6, 4
_SCOPES, _TCP = 3, 3  # abstract sockets and signals; bind and connect
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}  # of files, by version
_RIGHTS_NOW = 0xFFFF
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _CONTROL = 1, 2, 4, 8, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _CONTROL


def version() -> int:
    """Return the version of the kernel's interface; 0 where there is none."""
    try:
        return kernel.syscall("landlock", _CREATE, None, ctypes.c_size_t(0), _VERSION)
    except OSError:
        return 0


def scopes_signals() -> bool:
    """Whether signals to processes outside can be kept back."""
    return version() >= _SCOPED_SINCE


def restrict(readable: Iterable[str], listed: Iterable[str], writable: Iterable[str], *, tcp: bool) -> None:
    """Give up everything else, for this thread and all that it starts; of folders in `listed` names are seen."""
    found = version()
    rights = _RIGHTS.get(found, _RIGHTS_NOW)
    network = _TCP if found >= _NETWORK_SINCE and not tcp else 0
    asked = struct.pack("=QQQ", rights, network, _SCOPES if found >= _SCOPED_SINCE else 0)
    size = 24 if found >= _SCOPED_SINCE else 16 if found >= _NETWORK_SINCE else 8
    rules = kernel.syscall("landlock_create_ruleset", _CREATE, asked[:size], ctypes.c_size_t(size), 0)
    for paths, allowed in ((readable, _EXECUTE | _READ | _LIST), (listed, _LIST), (writable, rights)):
        for path in paths:
            _allow(rules, path, allowed & rights)
    kernel.forbid_new_privileges()
    kernel.syscall("landlock_restrict_self", _RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    """Allow rights below a path; one that is not there is left out."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights, place)
        kernel.syscall(f"landlock_add_rule {path}", _ADD, rules, _PATH_BENEATH, rule, 0)
    finally:
        os.close(place)
