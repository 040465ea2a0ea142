"""Render and count rows in child processes, a few hundred rows at a time.

Requests take turns after each batch, so that none waits for another's whole file. The CPU time of a request is limited,
and counting stops when its client disconnects.
"""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import LifoQueue
from typing import IO, Any, Literal, cast

from app.db.tables import BaseModelEntry
from app.errors import Unavailable
from app.files import counter
from app.files.counter import Numbered, Question
from app.files.tokenizer import tokenizer_folder, unavailable
from app.ops.processes import keyless_environment, python

_BATCH_ROWS, _BATCH_CHARS = 256, 1 << 20
_ANSWER_S = 120.0  # for one batch, on a busy machine; a process that takes longer is killed
_FIXED = {"TOKENIZERS_PARALLELISM": "false"}  # each process takes one core

Task = Literal["count", "show"]


@dataclass
class Allowance:
    """The CPU seconds that one request may use, and whether its client has disconnected."""

    cpu_s: float
    is_gone: Callable[[], bool]
    used_s: float = 0.0

    @property
    def is_exhausted(self) -> bool:
        """True if the time is used up or the client has disconnected."""
        return self.used_s >= self.cpu_s or self.is_gone()


@dataclass
class Answer:
    """The results of the rows that were processed, and the token limit of a row."""

    limit: int
    rows: list[Any] = field(default_factory=list)


class Counters:
    """The counting processes of one API process; each is started at its first use."""

    def __init__(self, processes: int) -> None:
        self._idle: LifoQueue[_Process] = LifoQueue()
        self._all = [_Process() for _ in range(processes)]
        for process in self._all:
            self._idle.put(process)

    def ask(
        self, task: Task, entry: BaseModelEntry, lines: Iterable[Numbered], allowance: Allowance, asked: int | None
    ) -> Answer:
        """Run a task on the lines, in order, until the allowance is exhausted.

        `asked` is the `max_seq_length` of the request. Raises `InvalidState` if the model's tokenizer cannot be read,
        and `Unavailable` if a process failed.
        """
        folder, found = str(tokenizer_folder(entry)), None
        arguments = json.dumps(entry.template_arguments or {}, sort_keys=True)
        for batch in _batches(lines):
            # An empty file is asked about too, with an empty batch: the answer holds the token limit.
            question: Question = {
                "task": task,
                "folder": folder,
                "template_arguments": arguments,
                "max_seq_length": asked,
                "lines": batch,
            }
            said = self._ask(question)
            if "error" in said:
                raise unavailable(entry)
            found = found or Answer(said["limit"])
            found.rows += said["rows"]
            allowance.used_s += said["cpu_s"]
            if allowance.is_exhausted:
                break
        return found or Answer(0)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.end()

    def _ask(self, question: Question) -> counter.Answer:
        process = self._idle.get()
        try:
            return process.ask(question)
        finally:
            self._idle.put(process)


class _Process:
    """One process; it is restarted after a failure."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None

    def ask(self, question: Question) -> counter.Answer:
        # Started at the first question, so that an API process without previews pays nothing for it.
        running = self._running = self._running or _start()
        stdin, stdout = cast(IO[bytes], running.stdin), cast(IO[bytes], running.stdout)
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            line = stdout.readline() if _is_readable(stdout, _ANSWER_S) else b""
            found: counter.Answer = json.loads(line)
        except (OSError, ValueError):
            self.end()
            raise Unavailable("The rows could not be rendered this time; try again.") from None
        return found

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.wait()
            for pipe in (running.stdin, running.stdout):
                with suppress(OSError):  # closing flushes unwritten input to a process that is gone
                    cast(IO[bytes], pipe).close()


def _is_readable(pipe: IO[bytes], wait_s: float) -> bool:
    """Wait until a pipe can be read; `select` does not support descriptors above 1,023."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _start() -> subprocess.Popen[bytes]:
    """Start a process without secrets in its environment; it exits when its standard input closes."""
    environment = keyless_environment(_FIXED)
    command = python("app.files.counter")
    # In a session of its own: signals to the API's process group do not reach it.
    return subprocess.Popen(  # noqa: S603 - the command is ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


def _batches(lines: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Yield the lines in batches; a single empty batch if there are no lines."""
    batch, chars = list[Numbered](), 0
    is_first = True
    for line, text in lines:
        batch.append((line, text))
        chars += len(text)
        if len(batch) == _BATCH_ROWS or chars >= _BATCH_CHARS:
            yield batch
            batch, chars, is_first = [], 0, False
    # One empty batch for an empty file: its answer still has the token limit.
    if batch or is_first:
        yield batch
