"""The process that runs a program written by a model: it can compute, and read only the standard library.

The program comes on standard input. The process enters its own namespaces, without network, with a private root that
contains the interpreter's library and no `/proc`; it cannot affect processes outside; its memory, CPU time and number
of processes are limited; and nothing that it starts outlives it. It gives up root if other users can read the library.
After the tests it prints a secret word, which a program can print early only by searching this process for it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import TypedDict

from spard.isolation import filters, kernel, roots

_NOBODY = 65534
_PROCESSES = 64
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SPACES = kernel.NEW_FILES | kernel.NEW_NAME | kernel.NEW_IPC | kernel.NEW_PROCESSES | kernel.NEW_NETWORK


class ProgramRequest(TypedDict):
    """A program, its tests, the word to print at their end, readable paths, and limits in bytes and seconds."""

    program: str
    tests: str
    word: str
    readable: list[str]
    memory: int
    seconds: int


def main() -> None:
    """Run the program and the tests from standard input; print the word if both ran without an error."""
    asked: ProgramRequest = json.load(sys.stdin)
    said = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    _give_up_root()
    kernel.enter_user_namespace(_SPACES)
    child = os.fork()
    if child:
        os.close(said)
        os.waitpid(child, 0)
        os._exit(0)
    kernel.die_with_parent(signal.SIGKILL)
    kernel.mount("none", "/", None, kernel.PRIVATE | kernel.RECURSIVE)
    roots.enter(asked["readable"], (), _DEVICES, with_processes=False)
    _limit(asked)
    kernel.drop_capabilities()
    filters.install((), may_make_namespaces=False)
    _judge(asked["program"], asked["tests"], asked["word"], said)


def _give_up_root() -> None:
    folder = os.path.realpath(os.__file__)
    while folder != "/":
        folder = os.path.dirname(folder)
        if not os.stat(folder).st_mode & 1:
            return
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        except PermissionError:
            return  # root of a user namespace, without power outside


def _limit(asked: ProgramRequest) -> None:
    limits = {
        resource.RLIMIT_AS: asked["memory"],
        resource.RLIMIT_CPU: asked["seconds"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: _PROCESSES,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def _judge(program: str, tests: str, word: str, said: int) -> None:
    """Run program and tests in one scope without any of our names, then print the word."""
    scope: dict[str, object] = {"__name__": "__main__"}
    write = os.write
    exec(compile(program, "program", "exec"), scope)  # noqa: S102 - the sandbox exists for this
    exec(compile(tests, "tests", "exec"), scope)  # noqa: S102
    write(said, word.encode())
