"""Landlock: a process gives up access to files outside some folders, and to foreign signals and sockets."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from spard.isolation import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH, _NET_PORT = 1, 2
_SCOPED_SINCE, _NETWORK_SINCE = 6, 4
_SCOPES, _ABSTRACT = 3, 1  # abstract sockets and signals; abstract sockets only
_BIND, _CONNECT = 1, 2
_TCP = _BIND | _CONNECT
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
Tcp = Literal["none", "own_ports", "all"]
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}  # file rights by Landlock version
_RIGHTS_NOW = 0xFFFF
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _CONTROL = 1, 2, 4, 8, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _CONTROL


def version() -> int:
    """Return the version of the kernel's Landlock interface; 0 without Landlock."""
    try:
        return kernel.syscall("landlock", _CREATE, None, ctypes.c_size_t(0), _VERSION)
    except OSError:
        return 0


def scopes_signals() -> bool:
    """Return True if the kernel can block signals to processes outside."""
    return version() >= _SCOPED_SINCE


def limits_ports() -> bool:
    """Return True if the kernel can restrict TCP to certain ports."""
    return version() >= _NETWORK_SINCE


def restrict_to_own_ports() -> None:
    """Give up TCP except on ephemeral ports, and abstract sockets of other processes.

    Servers on a fixed port, such as databases, become unreachable at any address. Does nothing if the kernel lacks
    support.
    """
    found = version()
    if found < _NETWORK_SINCE:
        return
    asked = struct.pack("=QQQ", 0, _TCP, _ABSTRACT if found >= _SCOPED_SINCE else 0)
    rules = _ruleset(asked, found)
    _allow_own_ports(rules)
    _enter(rules)


def restrict(readable: Iterable[str], listed: Iterable[str], writable: Iterable[str], *, tcp: Tcp) -> None:
    """Give up access to all other files, for this thread and its children; folders in `listed` can only be listed."""
    found = version()
    rights = _RIGHTS.get(found, _RIGHTS_NOW)
    network = _TCP if found >= _NETWORK_SINCE and tcp != "all" else 0
    asked = struct.pack("=QQQ", rights, network, _SCOPES if found >= _SCOPED_SINCE else 0)
    rules = _ruleset(asked, found)
    for paths, allowed in ((readable, _EXECUTE | _READ | _LIST), (listed, _LIST), (writable, rights)):
        for path in paths:
            _allow(rules, path, allowed & rights)
    if network and tcp == "own_ports":
        _allow_own_ports(rules)
    _enter(rules)


def _ruleset(asked: bytes, found: int) -> int:
    size = 24 if found >= _SCOPED_SINCE else 16 if found >= _NETWORK_SINCE else 8
    return kernel.syscall("landlock_create_ruleset", _CREATE, asked[:size], ctypes.c_size_t(size), 0)


def _enter(rules: int) -> None:
    kernel.forbid_new_privileges()
    kernel.syscall("landlock_restrict_self", _RESTRICT, rules, 0)
    os.close(rules)


def _allow_own_ports(rules: int) -> None:
    """Allow the ephemeral ports; a rule has one port, and port 0 means any of them."""
    first, last = map(int, _PORTS.read_text().split())
    allowed = [(0, _BIND), *((port, _TCP) for port in range(first, last + 1))]
    for port, rights in allowed:
        rule = struct.pack("=QQ", rights, port)
        kernel.syscall("landlock_add_rule", _ADD, rules, _NET_PORT, rule, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    """Allow rights below a path; a missing path is skipped."""
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
