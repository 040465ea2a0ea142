"""The child process of a job: started before there is a job, fed one folder, listened to, and never outliving us.

A child runs in a session of its own, behind walls and with an environment that holds no secret; its judge is asked
through us. It dies with its parent: the kernel kills it when the thread that started it ends, so that thread has to
live on.
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
from worker.cell import Cell, Given, sandbox_paths
from worker.desk import Desk, as_line
from worker.failures import SERVER_ERROR
from worker.nodes import Nodes
from worker.protocol import MAX_LINE, Message, parse
from worker.read_ahead import Wanted
from worker.workdir import Folder

COMMAND = python("worker.child")
MAX_LOG_BYTES = 10_000_000  # of a job's child
_LEVELS = {"CRITICAL": logging.ERROR, "ERROR": logging.ERROR, "WARNING": logging.WARNING}  # by a line's first word
_END_S, _LOOK_S = 2.0, 0.01  # from the end of what a child says to the end of its process
_QUEUED = 1000  # messages; a child that is faster than the database waits in its pipe


class Child:
    """One child process: warm until it is given a folder, heard until it ends, gone after `kill`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cell: Cell) -> None:
        self._cell = cell
        self._desk: Desk | None = None
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
        self.is_over = False  # it has ended, and everything it said was received
        self._has_said = False  # how its job has ended, or why
        for read, stream in ((self._read, self._process.stdout), (self._drain, self._process.stderr)):
            Thread(target=read, args=(cast(IO[bytes], stream),), daemon=True).start()

    @property
    def pid(self) -> int:
        """The number of its process, and of the group of all that it starts."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its process runs; what it said last may still wait in the queue."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """What it ended with; negative when a signal ended it."""
        return self._process.wait()

    def work(self, folder: Folder, **ids: str | None) -> None:
        """Tell it which folder to work on; a child that has died meanwhile says so by being over.

        What it logs is logged with `ids`.
        """
        self._log = self._log.bind(**ids)
        self._desk = self._cell.desk(folder, self._tell)  # before the child can change what it is made of
        given = sandbox_paths(folder)
        if self.nodes:
            self.nodes.start(folder, given)
        self.begin(folder, given)

    def read_ahead(self, wanted: Wanted) -> None:
        """Have it read a base model while it waits for a folder, if its walls can be closed for that."""
        line = self._cell.ahead(wanted)
        if line is not None:
            self._write(line)

    def begin(self, folder: Folder, given: Given) -> None:
        """Tell it which folder to work on, without a judge to ask."""
        self._write(self._cell.line(folder, given))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none came in time or the child has ended.

        Raises `Failed` when other machines of the job explain its end, or it could only wait for them in vain.
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
        """Ask it to checkpoint and stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all it started, now; returns when it is gone."""
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
        """Let a process that has said its last word end by itself, so that its exit code is its own and not our kill's.

        It is not reaped: its group may be signaled still.
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
        if self._process.returncode is None:  # else we have seen its end, and its number may be another's by now
            with suppress(ProcessLookupError, PermissionError):  # the second: all of it has ended
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
                    self._log.warning("the child said what is no message", bytes=len(line))
        self._messages.put(None)

    def _drain(self, stream: IO[bytes]) -> None:
        """Its log becomes ours, up to a limit; the rest is read and dropped, so that it never blocks."""
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
    """Whether a message says how the job has ended; a failure that was not foreseen may follow from another one."""
    kind = str(message["kind"])
    return kind == "done" or (kind == "failed" and str(message["code"]) != SERVER_ERROR)
