"""Model-written Python, run in a process that may compute and little else.

The child starts isolated (`-I -S`) without environment, drops root where the interpreter stays readable to others, and
enters namespaces of its own: no network, all files read-only, no power over processes outside, and nothing that it
starts outlives it. Its memory, processor time and number of processes are limited. Where the kernel does not give such
namespaces, nothing is run. Files that its user may read stay readable, so services run this in a container.
Leaving early is not passing: after the tests the child says a word that only a program made to deceive would look for.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache

from spard.errors import SandboxUnavailable

MEMORY_MB = 512
_GRACE_S = 5.0  # for the interpreter to start on a busy machine

_CHILD = """
import ctypes, json, os, resource, signal, sys
asked = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
said = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
def drop_root():
    folder = os.path.realpath(os.__file__)
    while folder != "/":
        folder = os.path.dirname(folder)
        if not os.stat(folder).st_mode & 1:
            return
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
def limit(name, value):
    resource.setrlimit(getattr(resource, name), (value, value))
drop_root()
NEW_USER, NEW_FILES, NEW_NET, NEW_IPC, NEW_PID = 0x10000000, 0x00020000, 0x40000000, 0x08000000, 0x20000000
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
mounts = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
isolated = libc.unshare(NEW_USER | NEW_FILES | NEW_NET | NEW_IPC | NEW_PID) == 0
isolated = isolated and libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, mounts, ctypes.sizeof(mounts)) == 0
if not isolated:
    os._exit(1)
child = os.fork()
if child:
    os.close(said)
    os.waitpid(child, 0)
    os._exit(0)
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
limit("RLIMIT_AS", asked["memory"])
limit("RLIMIT_CPU", asked["seconds"])
limit("RLIMIT_FSIZE", 0)
limit("RLIMIT_CORE", 0)
limit("RLIMIT_NPROC", 64)
word, tests = asked.pop("word"), asked["tests"]
scope = {"__name__": "__main__"}
def judge(write=os.write, run=exec, said=said, word=word):
    del globals()["word"], globals()["said"]
    run(compile(asked.pop("program"), "program", "exec"), scope)
    run(compile(tests, "tests", "exec"), scope)
    write(said, word.encode())
judge()
"""


def passes(program: str, tests: str, timeout_s: float, memory_mb: int = MEMORY_MB) -> bool:
    """Whether a program and then its tests run to their end in time."""
    if not is_available():
        raise SandboxUnavailable("This machine gives no isolated namespaces; score model-written code elsewhere.")
    return _run(program, tests, timeout_s, memory_mb)


@cache
def is_available() -> bool:
    """Whether children get their namespaces here and can run a program in them."""
    return _run("import collections, math, re", "assert re.sub('a', 'b', 'a') == 'b'", 5.0, MEMORY_MB)


def _run(program: str, tests: str, timeout_s: float, memory_mb: int) -> bool:
    word = secrets.token_hex(16)
    asked: dict[str, object] = {"program": program, "tests": tests, "word": word}
    asked |= {"memory": memory_mb << 20, "seconds": math.ceil(timeout_s)}
    process = subprocess.Popen(  # noqa: S603 - our own text; the program travels on standard input
        [sys.executable, "-I", "-S", "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(json.dumps(asked).encode(), timeout=timeout_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        said = b""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return said.decode(errors="replace") == word
