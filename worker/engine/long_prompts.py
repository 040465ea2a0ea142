"""Long prompts become tokens in a process of their own, one at a time, while replies are written on.

A prompt of a MiB takes seconds, also where it is refused then. A thread would hold Python's lock for much of that.
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
    """Make it before the model is loaded, which a process that is forked later would share with its device.

    What was read comes as a line into `lines`, and None where the process has ended. It reads its tokenizer when the
    first prompt comes.
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
        """Have a prompt read when its project's turn comes."""
        self._turns.add(waiting)
        self._asked_with[waiting.id] = system, mode
        self._positions = positions
        self._start_next()

    def drop(self, number: int) -> None:
        """Let a request wait no longer; what is read of it already is of no use to anybody."""
        self._turns.drop(number)
        self._asked_with.pop(number, None)
        if self._read and self._read.id == number:
            self._is_wanted = False

    def take(self, line: Any) -> Waiting | None:
        """Return the request whose prompt a line holds, None if it was dropped; the next one is read from now on."""
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
    """Be the process: read prompts until nobody asks any more."""
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
