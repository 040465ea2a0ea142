"""Rows rendered and counted in processes of their own, a few hundred at a time.

Requests take turns after each of these batches, so that none waits for another's whole file; what a request may compute
is limited, and a client that has left is counted for no further.
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
_ANSWER_S = 120.0  # for one batch, on a machine that does much else; a process that needs longer is ended
_FIXED = {"TOKENIZERS_PARALLELISM": "false"}  # each process takes one core

Task = Literal["count", "show"]


@dataclass
class Allowance:
    """What one request may compute, in seconds of CPU, and whether anybody waits for it still."""

    cpu_s: float
    is_gone: Callable[[], bool]
    used_s: float = 0.0

    @property
    def is_exhausted(self) -> bool:
        """Whether the time is used up or the client has left."""
        return self.used_s >= self.cpu_s or self.is_gone()


@dataclass
class Answer:
    """What was found of the rows that were looked at, and how many tokens a row may have."""

    limit: int
    rows: list[Any] = field(default_factory=list)


class Counters:
    """The processes that count for one API process; each is started when it is needed first."""

    def __init__(self, processes: int) -> None:
        self._idle: LifoQueue[_Process] = LifoQueue()
        self._all = [_Process() for _ in range(processes)]
        for process in self._all:
            self._idle.put(process)

    def ask(
        self, task: Task, entry: BaseModelEntry, lines: Iterable[Numbered], allowance: Allowance, asked: int | None
    ) -> Answer:
        """Do a task for as many of the lines as the allowance is good for, from the first on."""
        folder, found = str(tokenizer_folder(entry)), None
        for batch in _batches(lines):
            question: Question = {"task": task, "folder": folder, "max_seq_length": asked, "lines": batch}
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
    """One process; it is started again after it has failed."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None

    def ask(self, question: Question) -> counter.Answer:
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
                with suppress(OSError):  # what it has not taken is of no use to anybody
                    cast(IO[bytes], pipe).close()


def _is_readable(pipe: IO[bytes], wait_s: float) -> bool:
    """Wait until a pipe can be read; `select` would not take descriptors above 1,023."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _start() -> subprocess.Popen[bytes]:
    """Start a process without our keys in its environment; it ends when its standard input does."""
    environment = keyless_environment(_FIXED)
    command = python("app.files.counter")
    return subprocess.Popen(  # noqa: S603 - the command is ours
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


def _batches(lines: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    """Yield the lines in pieces; one, though empty, if there are none."""
    batch, chars = list[Numbered](), 0
    is_first = True
    for line, text in lines:
        batch.append((line, text))
        chars += len(text)
        if len(batch) == _BATCH_ROWS or chars >= _BATCH_CHARS:
            yield batch
            batch, chars, is_first = [], 0, False
    if batch or is_first:
        yield batch
