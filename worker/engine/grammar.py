"""Replies in the form of a JSON schema: tokens that the form has no place for are not chosen, row by row.

llguidance says after each token which ones may follow; it runs in processes of its own (`grammar_process`), so that the
engine waits for no schema. Rows of other requests in the same batch are not touched. There is one white space after
commas and colons, as `json.dumps` writes it: where any number is allowed, small models write nothing else.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor

from spard.errors import SpardError
from worker.engine.fair_queue import FairQueue, Waiting
from worker.engine.grammar_process import COMPILE_CPU_S, FIRST, LAST, STEP, Header, serve_schemas

_AT_ONCE = 2  # schemas that are compiled at a time, each of another project
_BITS = torch.arange(8, dtype=torch.uint8)
_COSTLY = (
    f"This schema takes more than {COMPILE_CPU_S:g} s of CPU time, or too much memory, to prepare. Make it simpler: "
    "fewer patterns, smaller bounds of repeats, shorter lists of values."
)
_COSTLY_LATER = (
    "The reply cannot be held to this schema any further: it has become too costly to follow. Make it simpler."
)


class Unwritable(SpardError):
    """A schema that no reply can be held to here; the code is what the client gets."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Form:
    """The process that follows a request's replies; `error` is set where it was refused or has ended."""

    def __init__(self, end: Connection, project: str, logits: int) -> None:
        self.end, self.project, self._logits = end, project, logits
        self.is_compiled = False
        self.error: Unwritable | None = None
        self._masks: dict[int, bytes] = {}

    def receive(self) -> None:
        """Read what the process has said; call it when `end` can be read."""
        try:
            line = self.end.recv_bytes()
        except (EOFError, OSError):
            self._end_costly()
            return
        if self.is_compiled:
            self._masks[int.from_bytes(line[:4], "little", signed=True)] = line[4:]
            return
        answer = json.loads(line)
        self.is_compiled = True
        if answer["error"] is not None:
            message = f"This schema cannot be held to: {answer['error']}"
            self.error = Unwritable(answer["code"], message)

    def has_mask(self, index: int) -> bool:
        """Whether the next token of a reply can be chosen, or never will be."""
        return index in self._masks or self.error is not None

    def send(self, index: int, token: int) -> None:
        """Tell the newest token of a reply, or `FIRST` or `LAST`; the next mask is that behind it."""
        self._masks.pop(index, None)
        try:
            self.end.send_bytes(STEP.pack(index, token))
        except OSError:  # which `receive` finds out, too
            self._end_costly()

    def mask_logits(self, index: int, logits_V: Tensor) -> Tensor:
        """Return the logits, those of tokens that may not come next at minus infinity; raise `Unwritable`."""
        if self.error is not None:
            raise self.error
        mask = self._masks[index]
        if not mask:
            raise Unwritable("schema_too_costly", _COSTLY_LATER)
        bits_N = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        may_V = ((bits_N.unsqueeze(1) >> _BITS) & 1).flatten()[: self._logits].bool()
        return logits_V.masked_fill(~may_V, float("-inf"))

    def _end_costly(self) -> None:
        """Note that the process has ended, which it does by its limits."""
        self.error = self.error or Unwritable("schema_too_costly", _COSTLY_LATER if self.is_compiled else _COSTLY)


class FormOfReply:
    """The form of one of a request's replies."""

    def __init__(self, form: Form, index: int) -> None:
        self._form, self._index = form, index
        form.send(index, FIRST)

    @property
    def is_ready(self) -> bool:
        """Whether the next token can be chosen without waiting."""
        return self._form.has_mask(self._index)

    def mask_logits(self, logits_V: Tensor) -> Tensor:
        """Return the logits, those of tokens that may not come next at minus infinity; raise `Unwritable`."""
        return self._form.mask_logits(self._index, logits_V)

    def note(self, token: int) -> None:
        """Move on past a token."""
        self._form.send(self._index, token)

    def close(self) -> None:
        """Note that the reply has ended."""
        self._form.send(self._index, LAST)


class Forms:
    """Has schemas compiled, a few at a time and one of a project, and hears from the processes that follow replies.

    Make it before the model is loaded, which a process that is forked later would share with its device. A project has
    at most `most` forms that are compiled or followed; further requests wait.
    """

    def __init__(self, source: str, revision: str | None, most: int, own: int | None = None) -> None:
        self._requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        closed = [self._requests.fileno(), *([] if own is None else [own])]
        process = get_context("fork").Process(
            target=_serve, args=(other, closed, source, revision, os.getpid()), daemon=True
        )
        process.start()
        other.close()
        self.pid = process.pid  # of the process that compiles
        self._most, self._queue = most, FairQueue()
        self._ends: dict[int, Collection[int]] = {}
        self._compiling: dict[int, tuple[Waiting, Form]] = {}
        self._followed: dict[int, Form] = {}
        self.logits = 0  # of the model, which is read later
        self.is_lost = False  # whether the process that compiles has ended

    @property
    def is_busy(self) -> bool:
        """Whether a schema waits or is compiled."""
        return bool(self._queue or self._compiling)

    def add(self, waiting: Waiting, ends: Collection[int]) -> None:
        """Have a request's schema compiled when its project's turn comes; `ends` are the tokens that end a reply."""
        self._queue.add(waiting)
        self._ends[waiting.id] = ends
        self._start()

    def drop(self, number: int) -> None:
        """End the processes of a request, which compile or follow for it."""
        self._queue.drop(number)
        self._ends.pop(number, None)
        _, form = self._compiling.pop(number, (None, None))
        form = form or self._followed.pop(number, None)
        if form:
            form.end.close()
            self._start()

    def close(self) -> None:
        """End all processes."""
        for form in self._all():
            form.end.close()
        self._requests.close()

    def form(self, number: int) -> Form | None:
        """Return the form that the replies to a request are held to."""
        return self._followed.get(number)

    def receive(self, timeout_s: float) -> list[tuple[Waiting, Unwritable | None]]:
        """Wait until a process says something, and read all that was said.

        Return the requests whose schemas were compiled, or refused with an error.
        """
        forms = {each.end: each for each in self._all() if each.error is None}
        for end in wait(list(forms), timeout_s):
            forms[end].receive()  # type: ignore[index]
        done = [number for number, (_, form) in self._compiling.items() if form.is_compiled or form.error]
        found = []
        for number in done:
            waiting, form = self._compiling.pop(number)
            self._followed[number] = form
            found.append((waiting, form.error))
            if form.error:
                self.drop(number)
        self._start()
        return found

    def _all(self) -> list[Form]:
        return [*(form for _, form in self._compiling.values()), *self._followed.values()]

    def _start(self) -> None:
        """Start to compile for projects that compile nothing, as many as may at a time."""
        while len(self._compiling) < _AT_ONCE:
            waiting = self._queue.take_first(self._may_compile)
            if waiting is None:
                return
            end, other = get_context("fork").Pipe()
            header = Header(sorted(self._ends.pop(waiting.id)), self.logits)
            # In a file: a pipe that holds less than the schema would keep the engine until a process reads it.
            with other, os.fdopen(os.memfd_create("schema"), "wb") as schema:
                schema.write(json.dumps(waiting.ask["json_schema"]).encode())
                schema.flush()
                try:
                    socket.send_fds(self._requests, [json.dumps(header).encode()], [other.fileno(), schema.fileno()])
                except OSError:
                    self.is_lost = True
            self._compiling[waiting.id] = waiting, Form(end, waiting.project, self.logits)

    def _may_compile(self, project: str) -> bool:
        compiles = any(form.project == project for _, form in self._compiling.values())
        return not compiles and sum(form.project == project for form in self._followed.values()) < self._most


def _serve(requests: socket.socket, closed: list[int], source: str, revision: str | None, parent: int) -> None:
    for each in closed:
        os.close(each)
    serve_schemas(requests, source, revision, parent)
