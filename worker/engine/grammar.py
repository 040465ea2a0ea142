"""Constrain replies to a JSON schema: for each token, mask the logits of tokens that the schema does not allow.

llguidance computes the allowed tokens after each token. It runs in separate processes (`grammar_process`), so the
engine never waits for a schema, and other rows of the batch are not affected. Exactly one space is allowed after commas
and colons, as `json.dumps` writes it: if any number is allowed, small models write nothing but spaces.
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

_AT_ONCE = 2  # schemas that are compiled at the same time, each for a different project
_BITS = torch.arange(8, dtype=torch.uint8)
_COSTLY = (
    f"This schema takes more than {COMPILE_CPU_S:g} s of CPU time, or too much memory, to prepare. Make it simpler: "
    "fewer patterns, smaller bounds of repeats, shorter lists of values."
)
_COSTLY_LATER = (
    "The reply cannot be held to this schema any further: it has become too costly to follow. Make it simpler."
)


class Unwritable(SpardError):
    """A schema that replies cannot be constrained to; `code` is the error code for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Form:
    """A request's compiled schema: the connection to the process that computes the masks of its replies.

    `error` is set when the schema was refused or the process has ended.
    """

    def __init__(self, end: Connection, project: str, logits: int) -> None:
        self.end, self.project, self._logits = end, project, logits
        self.is_compiled = False
        self.error: Unwritable | None = None
        self._masks: dict[int, bytes] = {}

    def receive(self) -> None:
        """Read one message of the process; call it when `end` is readable."""
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
        """Return True if a reply's next mask has arrived, or an error means that none will."""
        return index in self._masks or self.error is not None

    def send(self, index: int, token: int) -> None:
        """Send a reply's newest token, or `FIRST` or `LAST`, and drop the old mask; the next mask answers it."""
        self._masks.pop(index, None)
        try:
            self.end.send_bytes(STEP.pack(index, token))
        except OSError:  # the process has ended
            self._end_costly()

    def mask_logits(self, index: int, logits_V: Tensor) -> Tensor:
        """Return a reply's logits [V] with the logits of forbidden tokens set to minus infinity.

        Raises `Unwritable` if the process has ended or the schema has become too costly to follow.
        """
        if self.error is not None:
            raise self.error
        mask = self._masks[index]
        if not mask:
            raise Unwritable("schema_too_costly", _COSTLY_LATER)
        bits_N = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        may_V = ((bits_N.unsqueeze(1) >> _BITS) & 1).flatten()[: self._logits].bool()
        return logits_V.masked_fill(~may_V, float("-inf"))

    def _end_costly(self) -> None:
        """Set the error for a process that has ended, as one does when it exceeds its CPU or memory limit."""
        self.error = self.error or Unwritable("schema_too_costly", _COSTLY_LATER if self.is_compiled else _COSTLY)


class FormOfReply:
    """The schema state of one reply of a request."""

    def __init__(self, form: Form, index: int) -> None:
        self._form, self._index = form, index
        form.send(index, FIRST)

    @property
    def is_ready(self) -> bool:
        """Return True if the next token can be chosen without waiting."""
        return self._form.has_mask(self._index)

    def mask_logits(self, logits_V: Tensor) -> Tensor:
        """Return the logits [V] with forbidden tokens at minus infinity; raise `Unwritable` if the mask is lost."""
        return self._form.mask_logits(self._index, logits_V)

    def note(self, token: int) -> None:
        """Advance the schema state by a token that was written."""
        self._form.send(self._index, token)

    def close(self) -> None:
        """Free the state of a reply that has ended."""
        self._form.send(self._index, LAST)


class Forms:
    """Compiles schemas, a few at a time and one for each project, and receives the masks from their processes.

    Create it before the model is loaded: it forks a process, which must not share the model's memory and device. A
    project has at most `most` compiled schemas in use; its further requests wait. `own` is a file descriptor of the
    engine that the forked process closes.
    """

    def __init__(self, source: str, revision: str | None, most: int, own: int | None = None) -> None:
        self._requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        closed = [self._requests.fileno(), *([] if own is None else [own])]
        process = get_context("fork").Process(
            target=_serve, args=(other, closed, source, revision, os.getpid()), daemon=True
        )
        process.start()
        other.close()
        self.pid = process.pid  # of the process that forks the compilers
        self._most, self._queue = most, FairQueue()
        self._ends: dict[int, Collection[int]] = {}
        self._compiling: dict[int, tuple[Waiting, Form]] = {}
        self._followed: dict[int, Form] = {}
        self.logits = 0  # the model's number of logits; set once it is loaded
        self.is_lost = False  # the process that forks the compilers has ended

    @property
    def is_busy(self) -> bool:
        """Return True if a schema waits to be compiled or is being compiled."""
        return bool(self._queue or self._compiling)

    def add(self, waiting: Waiting, ends: Collection[int]) -> None:
        """Queue a request's schema for compilation; `ends` are the token ids that end a reply."""
        self._queue.add(waiting)
        self._ends[waiting.id] = ends
        self._start()

    def drop(self, number: int) -> None:
        """End a request's process and forget its schema, at any stage."""
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
        """Return the compiled schema of a request; None if it has none."""
        return self._followed.get(number)

    def receive(self, timeout_s: float) -> list[tuple[Waiting, Unwritable | None]]:
        """Wait up to `timeout_s` for messages of the processes, and read the messages that have arrived.

        Return the requests whose schemas are compiled now, with None, or were refused, with the error.
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
        """Start compilations up to `_AT_ONCE`, for projects that have none running."""
        while len(self._compiling) < _AT_ONCE:
            waiting = self._queue.take_first(self._may_compile)
            if waiting is None:
                return
            end, other = get_context("fork").Pipe()
            header = Header(sorted(self._ends.pop(waiting.id)), self.logits)
            # By a file, not a pipe: a schema larger than the pipe's buffer blocks the engine until it is read.
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
