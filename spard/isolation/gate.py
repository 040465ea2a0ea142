"""The process that starts another one in isolation: python -I -S -c BOOT ORDER COMMAND...

It starts the command at once and waits for a line on standard input that lists the resources which the command may
reach. Then it completes the isolation and passes the command its folder; later lines are forwarded unchanged. An
earlier line may list files that the command reads while it waits (`ahead`): the isolation is completed around these,
and renewed with the folder.

namespaces  the command runs in its own namespaces from the start; each line makes its root a private one, before
            the command reads any foreign file
landlock    Landlock cannot restrict all threads of a running process, so the command starts only after the line,
            and nothing is read ahead
none        the command gets its folder without any isolation

The gate is the first process of its namespace: it adopts orphans, and when it ends, all processes end.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Literal, TypedDict

from spard.isolation import filters, kernel, landlock, roots

Talks = Literal["alone", "machine", "nodes"]

FAILED = 70  # the isolation could not be completed
_BY_SIGNAL = 128
_FIXED = (signal.SIGKILL, signal.SIGSTOP)
_LOCAL = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_TCP: dict[Talks, landlock.Tcp] = {"alone": "none", "machine": "all", "nodes": "own_ports"}
_ALL_SPACES = kernel.NEW_FILES | kernel.NEW_NAME | kernel.NEW_IPC | kernel.NEW_PROCESSES | kernel.NEW_NETWORK


class Order(TypedDict):
    """How to start: the kind of isolation, the parent's process id, and the allowed socket peers.

    alone    none
    machine  the processes of the same job on this machine
    nodes    the processes of the same job on other machines too: the host's network stays, restricted to TCP on
             ephemeral ports
    """

    sandbox: str
    parent: int
    talks: Talks


class Line(TypedDict):
    """The line that completes the isolation: the working folder, and other readable and writable paths.

    listed  folders in which modules are searched; a private root contains them anyway
    ahead   text that the command receives instead of a folder, which a later line names; None: this line has the folder
    """

    ahead: str | None
    folder: str
    listed: list[str]
    readable: list[str]
    writable: list[str]


def main() -> None:
    """Enter the isolation that the order names, and start the command inside."""
    order: Order = json.loads(sys.argv[1])
    os.chdir("/")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.environ.pop("TMPDIR", None)
    if order["sandbox"] == "namespaces":
        shared = kernel.NEW_NETWORK | kernel.NEW_NAME if order["talks"] == "nodes" else 0
        kernel.enter_user_namespace(_ALL_SPACES & ~shared)
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != order["parent"]:
        os._exit(1)
    if order["sandbox"] == "namespaces":
        # A process stays in its PID namespace; only its children enter the new one. The fork must therefore come first.
        _relay_exit(_fork_child())
    _keep(order, sys.argv[2:])


def _fork_child() -> int:
    """Return the child's process id, or 0 in the child; the child dies with this process."""
    parent = os.getpid()
    number = os.fork()
    if number == 0:
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() not in (parent, 0):  # 0: the parent is outside this namespace
            os._exit(1)
    return number


def _relay_exit(child: int) -> None:
    """In the parent, wait for the child and exit with its status; in the child, return.

    The parent keeps standard output open, whose end is therefore seen only when the last process ends.
    """
    if child:
        _exit_like(os.waitpid(child, 0)[1])


def _keep(order: Order, command: list[str]) -> None:
    """Start the command, complete the isolation, and stay until the command has ended."""
    line: Line | None = None
    if order["sandbox"] == "namespaces":
        kernel.mount("none", "/", None, kernel.PRIVATE | kernel.RECURSIVE)
        roots.shows_own_processes()
        if order["talks"] != "nodes":
            kernel.enable_loopback()
            kernel.name_host("localhost")
    elif order["sandbox"] == "landlock":
        line = _read_order()
        if line is None:
            os._exit(0)
    ours, theirs = os.pipe()
    child = _start_command(order, command, ours, line)
    os.close(ours)
    threading.Thread(target=_tell, args=(order, theirs, line), daemon=True).start()
    _wait_and_exit(child)


def _tell(order: Order, stdin: int, line: Line | None) -> None:
    """Complete the isolation, pass the command its folder, and forward later lines; runs in a thread."""
    before: int | None = None
    line = _read_order() if line is None else line
    with open(stdin, "wb", buffering=0) as told, suppress(BrokenPipeError):
        while line is not None:
            if order["sandbox"] == "namespaces":
                try:
                    before = _close(line, before)
                except OSError as error:
                    _fail(error)
            told.write(f"{line['ahead'] or line['folder']}\n".encode())
            line = _read_order() if line["ahead"] else None
        while more := sys.stdin.buffer.readline():
            told.write(more)


def _read_order() -> Line | None:
    text = sys.stdin.buffer.readline()
    line: Line | None = json.loads(text) if text else None
    return line


def _close(line: Line, before: int | None) -> int | None:
    """Enter a private root, which contains only the files to read ahead, or only those of the job.

    `before` is the result of the previous call: None, or a descriptor of the real root, from which a second private
    root must be made. Returns a descriptor if another root follows, else None.
    """
    devices = [f"/dev/{name}" for name in roots.DEVICES] + roots.accelerators()
    if line["ahead"] and before is None:
        return roots.enter_first(line["readable"], [target for _, target in _places("")], devices)
    if line["ahead"]:
        raise OSError(errno.EINVAL, "a sandbox is closed around what is read ahead only once")
    if before is None:
        roots.enter(line["readable"], _writable(line), devices, with_processes=True)
    else:
        roots.enter_next(before, line["readable"], _writable(line), devices)
    return None


def _writable(line: Line) -> list[tuple[str, str]]:
    """Return (current path, path in the private root) of everything writable, temporary folders included."""
    folder = line["folder"]
    return [(folder, folder), *((path, path) for path in line["writable"]), *_places(folder)]


def _places(folder: str) -> list[tuple[str, str]]:
    """Return (path in `folder`, path seen by the command) of the temporary folder and the home folder."""
    both = ("tmp", "/tmp"), ("home", os.environ.get("HOME", "/"))  # noqa: S108 - its own
    return [(f"{folder}/{name}", target) for name, target in both if target != "/"]


def _start_command(order: Order, command: list[str], stdin: int, line: Line | None) -> int:
    """Start the command and return its process id; with `line`, restrict it by Landlock first."""
    child = _fork_child()
    if child:
        return child
    try:
        os.dup2(stdin, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if line is not None:
            _restrict(order, line)
        elif order["sandbox"] == "namespaces":
            kernel.drop_capabilities()
            if order["talks"] == "nodes":
                landlock.restrict_to_own_ports()
            filters.install(_LOCAL, may_make_namespaces=True, datagrams=order["talks"] != "nodes")
        os.execv(command[0], [*command, str(os.getppid())])  # noqa: S606 - the command is ours
    except OSError as error:
        _fail(error)
    return child


def _restrict(order: Order, line: Line) -> None:
    folder = line["folder"]
    for name, place in (("TMPDIR", "tmp"), ("HOME", "home")):
        os.environ[name] = own = os.path.join(folder, place)
        os.makedirs(own, exist_ok=True)
    devices = [f"/dev/{name}" for name in roots.DEVICES] + roots.accelerators()
    is_many = order["talks"] != "alone"
    readable = [*line["readable"], "/proc", "/sys"]
    writable = [folder, *line["writable"], *devices] + (["/dev/shm"] if is_many else [])  # noqa: S108
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    landlock.restrict(readable, line["listed"], writable, tcp=_TCP[order["talks"]])
    families = _LOCAL if is_many else ()
    filters.install(families, may_make_namespaces=False, datagrams=order["talks"] != "nodes")


def _wait_and_exit(child: int) -> None:
    """Wait for the command, reaping adopted orphans meanwhile; exit with the command's status."""
    while True:
        try:
            ended, status = os.wait()
        except InterruptedError:
            continue
        if ended == child:
            _exit_like(status)


def _exit_like(status: int) -> None:
    """Exit with the same status, or by the same signal.

    Signals cannot end the first process of a namespace, which therefore exits with 128 plus the signal's number; the
    process outside translates that back.
    """
    code = os.waitstatus_to_exitcode(status)
    number = -code if code < 0 else code - _BY_SIGNAL
    if 0 < number < signal.NSIG:
        if os.getpid() == 1:
            os._exit(_BY_SIGNAL + number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in _FIXED:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(code)


def _fail(error: OSError) -> None:
    name = errno.errorcode.get(error.errno or 0, "?")
    os.write(2, f"the process cannot be isolated ({name}): {error}\n".encode())
    os._exit(FAILED)
