"""Tokenize long prompts in a separate process, one at a time, while the engine continues its replies.

Tokenizing a prompt of 1 MiB takes seconds, even if it is then refused as too long. A thread holds the GIL for much of
that time, so it is a process.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from app.inference.protocol import Ask
from app.ops.processes import die_with_parent
from spard.data.rendering import Mode
from spard.errors import SpardError
from spard.models.base import read_tokenizer
from worker.engine.fair_queue import FairQueue, Waiting
from worker.engine.prompts import Prompts


class LongPrompts:
    """Tokenizes prompts in a forked process, in which projects take turns.

    Create it before the model is loaded: the forked process must not share the model's memory and device. Each
    tokenized prompt arrives as a line in `lines`; None arrives when the process has ended. `own` is a file descriptor
    of the engine that the process closes.
    """

    def __init__(self, source: str, revision: str | None, lines: SimpleQueue[Any], own: int | None = None) -> None:
        self._end, other = get_context("fork").Pipe()
        descriptors = [self._end.fileno(), *([] if own is None else [own])]
        told = (source, revision, other, descriptors, os.getpid())
        get_context("fork").Process(target=_read, args=told, daemon=True).start()
        other.close()
        self._turns, self._asked_with = FairQueue(), dict[int, tuple[str | None, Mode | None]]()
        self._read: Waiting | None = None
        self._is_wanted = True
        Thread(target=self._hear, args=(lines,), daemon=True).start()

    def add(self, waiting: Waiting, system: str | None, mode: Mode | None, positions: int) -> None:
        """Queue a prompt; `system`, `mode` and `positions` are as in `Prompts`."""
        self._turns.add(waiting)
        self._asked_with[waiting.id] = system, mode
        self._positions = positions
        self._start_next()

    def drop(self, number: int) -> None:
        """Drop a request; if its prompt is being tokenized, the result will be ignored."""
        self._turns.drop(number)
        self._asked_with.pop(number, None)
        if self._read and self._read.id == number:
            self._is_wanted = False

    def take(self, line: Any) -> Waiting | None:
        """Return the request that a line of tokens belongs to, or None if it was dropped; start the next prompt."""
        waiting, is_wanted = self._read, self._is_wanted
        self._read, self._is_wanted = None, True
        self._start_next()
        return replace(waiting, ids=line["ids"]) if waiting and is_wanted else None

    def _start_next(self) -> None:
        if self._read is None and self._turns:
            self._read = self._turns.take()
            asked_with = self._asked_with.pop(self._read.id)
            self._end.send_bytes(json.dumps([self._read.ask, *asked_with, self._positions]).encode())

    def _hear(self, lines: SimpleQueue[Any]) -> None:
        try:
            while True:
                lines.put({"op": "read"} | json.loads(self._end.recv_bytes()))
        except (EOFError, OSError):
            lines.put(None)


def _read(source: str, revision: str | None, end: Connection, others: list[int], parent: int) -> None:
    """Run the process: tokenize prompts until the engine closes the connection."""
    die_with_parent(parent)
    for each in others:
        os.close(each)
    prompts: Prompts | None = None
    while True:
        try:
            ask, system, mode, positions = json.loads(end.recv_bytes())
        except EOFError:
            return
        prompts = prompts or Prompts(read_tokenizer(source, revision), positions)
        end.send_bytes(json.dumps(_answer(prompts, ask, system, mode)).encode())


def _answer(prompts: Prompts, ask: Ask, system: str | None, mode: Mode | None) -> dict[str, object]:
    try:
        return {"ids": prompts.ids(ask, system, mode)}
    except SpardError as error:
        return {"ids": None, "code": error.code, "message": error.message}
