"""The child process of a job: start it before there is a job, give it one folder, receive its messages, kill it.

A child runs in its own session, in a sandbox and with an environment that holds no secret; it asks its judge through
the worker. The kernel kills it when the thread that started it ends, so that thread has to outlive the child.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Lock, Thread
from typing import IO, cast

import structlog

from app.ops.children import environment as environment
from app.ops.processes import python
from worker.failures import SERVER_ERROR
from worker.judge_calls import JudgeProxy, as_line
from worker.nodes import Nodes
from worker.protocol import MAX_LINE, Message, ModelRequest, parse
from worker.sandbox import AllowedPaths, ChildSandbox, allowed_paths
from worker.workdir import Folder

COMMAND = python("worker.child")
MAX_LOG_BYTES = 10_000_000  # of a job's child
_LEVELS = {"CRITICAL": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}  # by a line's first word
_END_S, _LOOK_S = 2.0, 0.01  # how long, and how often, to look for a child's exit after its output has ended
_QUEUED = 1000  # messages; a child that is faster than the database waits in its pipe


class Child:
    """One child process, from its start until `kill`.

        child = Child(COMMAND, environment(settings), cell)
        child.work(folder, job_id=...)
        while not child.is_over:
            message = child.receive(timeout_s=0.1)
        child.kill()

    It waits ("warm") until `work` gives it a folder, and does only that one job.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cell: ChildSandbox) -> None:
        self._cell = cell
        self._desk: JudgeProxy | None = None
        self.nodes: Nodes | None = None  # the other machines, while it works on its job
        self._writing = Lock()
        self._process = subprocess.Popen(  # noqa: S603 - the command is ours
            cell.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self._stdin = cast(IO[bytes], self._process.stdin)
        self._messages: Queue[Message | None] = Queue(maxsize=_QUEUED)
        self._log = structlog.get_logger(__name__).bind(child=self.pid)
        self.is_over = False  # its output has ended and all its messages were received
        self._has_said = False  # it has reported how its job ended
        for read, stream in ((self._read, self._process.stdout), (self._drain, self._process.stderr)):
            Thread(target=read, args=(cast(IO[bytes], stream),), daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group of all its descendants."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return True while the process runs; after its end, messages may still wait in the queue."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """The exit code, once the process has ended; -N if signal N ended it."""
        return self._process.wait()

    def work(self, folder: Folder, **ids: str | None) -> None:
        """Give the child its folder, and start the job's other machines; the child's log lines get `ids`.

        A child that has died meanwhile raises nothing here: `receive` soon finds that it is over.
        """
        self._log = self._log.bind(**ids)
        self._desk = self._cell.judge_proxy(folder, self._tell)  # before the child can change what it is made of
        given = allowed_paths(folder)
        if self.nodes:
            self.nodes.start(folder, given)
        self.begin(folder, given)

    def read_ahead(self, wanted: ModelRequest) -> None:
        """Make the waiting child read a base model, if its sandbox can be restricted to that model meanwhile."""
        line = self._cell.read_ahead_line(wanted)
        if line is not None:
            self._write(line)

    def begin(self, folder: Folder, given: AllowedPaths) -> None:
        """Give the child its folder, without a proxy for judge calls, which a follower's child does not need."""
        self._write(self._cell.line(folder, given))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none came within `timeout_s` or the child has ended.

        Raises `Failed` when another machine of the job is lost or has failed.
        """
        if self.is_over:
            return None
        message = None
        with suppress(Empty):
            message = self._messages.get(timeout=timeout_s)
            self.is_over = message is None
        self._has_said = self._has_said or (message is not None and _is_last_word(message))
        if self.nodes and not self._has_said:
            is_failed = message is not None and message["kind"] == "failed"
            self.nodes.check(ours_ended=self.is_over or is_failed)
        return message

    def terminate(self) -> None:
        """Ask the child to save a resume state and stop, by SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child and all its descendants, and wait until it is gone and its output is read."""
        if self.is_over:
            self._await_end()
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._desk:
            self._desk.close()
        self.nodes = None
        while not self.is_over:
            self.receive(timeout_s=1)
        with suppress(BrokenPipeError):
            self._stdin.close()

    def _await_end(self) -> None:
        """Wait up to 2 s for a process whose output has ended, so that its exit code is its own and not our kill's.

        WNOWAIT leaves it unreaped: its id stays reserved, so its process group can still be signaled safely.
        """
        give_up_at = time.monotonic() + _END_S
        with suppress(ChildProcessError):  # it was reaped before
            while time.monotonic() < give_up_at:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return
                time.sleep(_LOOK_S)

    def _tell(self, message: Message) -> None:
        self._write(as_line(message))

    def _write(self, line: bytes) -> None:
        with self._writing, suppress(BrokenPipeError, ValueError):  # it has died meanwhile, or was ended
            self._stdin.write(line)
            self._stdin.flush()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:  # else it was reaped, and another process may have its id by now
            with suppress(ProcessLookupError, PermissionError):  # the second: the whole group has ended
                os.killpg(self.pid, number)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(MAX_LINE):
                message = parse(line)
                if message and message["kind"] == "ask" and self._desk:
                    self._desk.take(message)
                elif message:
                    self._messages.put(message)
                else:
                    self._log.warning("the child sent something that is not a message", bytes=len(line))
        self._messages.put(None)

    def _drain(self, stream: IO[bytes]) -> None:
        """Copy the child's log into ours up to `MAX_LOG_BYTES`; read and drop the rest, so the child never blocks."""
        left = MAX_LOG_BYTES
        with stream:
            while line := stream.readline(MAX_LINE):
                if left > 0:
                    text = line.decode(errors="replace").rstrip()
                    self._log.log(_LEVELS.get(text.partition(" ")[0], logging.INFO), "child", line=text)
                    left -= len(line)
                    if left <= 0:
                        self._log.warning("the child's log is too long; the rest is dropped")


def _is_last_word(message: Message) -> bool:
    """Return True if a message reports how the job ended; an unforeseen failure may only follow from another rank's."""
    kind = str(message["kind"])
    return kind == "done" or (kind == "failed" and str(message["code"]) != SERVER_ERROR)
