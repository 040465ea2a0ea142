"""Requests that have no row in the batch yet: the queue in which projects take turns, and their prompts as token ids.

Prompts are rendered as in the audit; long ones are tokenized in a process of their own.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

from app.inference.protocol import Ask
from app.ops.processes import die_with_parent
from spard.data.chat import fix_template_arguments, render_as_recorded, render_conversation, tool_support
from spard.data.control_tokens import Shield, pieces
from spard.data.rendering import Mode
from spard.data.rows import example
from spard.data.tools import used_parts
from spard.errors import SpardError
from spard.models.base import measured_rendering, read_tokenizer
from spard.pipeline.messages import Message


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that has no row in the batch yet; `ids` are its prompt's tokens, if a process has made them already."""

    id: int
    project: str
    ask: Ask
    ids: list[int] | None = None


class FairQueue:
    """The waiting requests of all projects; truthy while there are any."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[QueuedRequest]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def projects(self) -> list[str]:
        """The projects with waiting requests, in the order of their turns."""
        return list(self._queues)

    def peek(self, project: str) -> QueuedRequest | None:
        """Return a project's next request without removing it, or None."""
        return self._queues[project][0] if project in self._queues else None

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request to the end of its project's queue."""
        self._queues.setdefault(waiting.project, deque()).append(waiting)

    def take(self) -> QueuedRequest:
        """Remove and return the next request, and end its project's turn."""
        return self.pop(next(iter(self._queues)))

    def take_first(self, may: Callable[[str], bool]) -> QueuedRequest | None:
        """Remove and return the next request of the first project for which `may` is true; None if there is none."""
        project = next((each for each in self._queues if may(each)), None)
        return None if project is None else self.pop(project)

    def pop(self, project: str) -> QueuedRequest:
        """Remove and return a project's next request, and move the project to the end of the turns."""
        queue = self._queues[project]
        found = queue.popleft()
        if queue:
            self._queues.move_to_end(project)
        else:
            del self._queues[project]
        return found

    def drop(self, number: int) -> None:
        """Remove the request with this number, if it is in the queue."""
        for project, queue in list(self._queues.items()):
            self._queues[project] = kept = deque(each for each in queue if each.id != number)
            if not kept:
                del self._queues[project]


class Refused(SpardError):
    """A request that this model cannot answer; `code` is the error code for the client."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Prompts:
    """Turns requests into token ids; a prompt has to be shorter than the model's `positions`, in tokens."""

    def __init__(self, tokenizer: Any, positions: int) -> None:
        self._tokenizer, self._positions = tokenizer, positions
        self._support = tool_support(tokenizer)

    def ids(self, ask: Ask, system: str | None, mode: Mode | None = None) -> list[int]:
        """Return the token ids of a request's messages or prompt.

        `system` and `mode` are the system prompt and mode of thinking of the model's audit; None means no system prompt
        and the base model's own mode. Raises `Refused` if the prompt is empty or too long, or the chat template fails.
        """
        messages = ask["messages"]
        row = self._text(ask["prompt"] or "", system) if messages is None else self._conversation(ask, system, mode)
        if not row:
            raise Refused("invalid_messages", "The prompt is empty.")
        if len(row) >= self._positions:
            raise Refused(
                "context_length_exceeded",
                f"This model's maximum context length is {self._positions} tokens. Your messages resulted in {len(row)}"
                " tokens. Please reduce the length of the messages.",
            )
        return row

    def _conversation(self, ask: Ask, system: str | None, mode: Mode | None) -> list[int]:
        raw = {"messages": ask["messages"], **({"tools": ask["tools"]} if ask["tools"] else {})}
        for part in sorted(used_parts(raw)):
            if not self._support[part]:
                raise Refused("tools_not_rendered", f"The model's chat template does not render {part}.")
        try:
            found = example(cast(Message, raw), 1)
            return render_conversation(self._tokenizer, found.messages, system, found.tools, mode=mode)
        except Exception as error:  # a template is a program and may raise anything; only this request fails
            why = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise Refused("invalid_messages", f"The model's chat template refuses these messages: {why}") from error

    def _text(self, text: str, system: str | None) -> list[int]:
        if system is not None:
            raise Refused("invalid_messages", "This model answers conversations only: it needs its system prompt.")
        start: list[int] = self._tokenizer("", add_special_tokens=True)["input_ids"]
        ((ids, _),) = pieces(self._tokenizer, [Shield(self._tokenizer).mark(text)])
        return [*start[:1], *ids]


# Tokenize long prompts in a separate process, one at a time, while the engine continues its replies.
#
# Tokenizing a prompt of 1 MiB takes seconds, even if it is then refused as too long. A thread holds the GIL for much
# of that time, so it is a process.


class LongPrompts:
    """Tokenizes prompts in a forked process, in which projects take turns.

    Create it before the model is loaded: the forked process must not share the model's memory and device. Each
    tokenized prompt arrives as a line in `lines`; None arrives when the process has ended. `own` is a file descriptor
    of the engine that the process closes. `arguments` are fixed for the chat template.
    """

    def __init__(
        self,
        source: str,
        revision: str | None,
        arguments: Mapping[str, object],
        lines: SimpleQueue[Any],
        own: int | None = None,
    ) -> None:
        self._end, other = get_context("fork").Pipe()
        descriptors = [self._end.fileno(), *([] if own is None else [own])]
        told = (source, revision, arguments, other, descriptors, os.getpid())
        get_context("fork").Process(target=_read, args=told, daemon=True).start()
        other.close()
        self._turns, self._asked_with = FairQueue(), dict[int, tuple[str | None, Mode | None]]()
        self._read: QueuedRequest | None = None
        self._is_wanted = True
        Thread(target=self._hear, args=(lines,), daemon=True).start()

    def add(self, waiting: QueuedRequest, system: str | None, mode: Mode | None, positions: int) -> None:
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

    def take(self, line: Any) -> QueuedRequest | None:
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


def _read(
    source: str,
    revision: str | None,
    arguments: Mapping[str, object],
    end: Connection,
    others: list[int],
    parent: int,
) -> None:
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
        prompts = prompts or read_prompts(source, revision, arguments, positions)
        end.send_bytes(json.dumps(_answer(prompts, ask, system, mode)).encode())


def read_prompts(source: str, revision: str | None, arguments: Mapping[str, object], positions: int) -> Prompts:
    """Return the prompts of a model without loading its weights; a whole model's are rendered as in its audit."""
    tokenizer = read_tokenizer(source, revision)
    render_as_recorded(tokenizer, measured_rendering(Path(source)))
    fix_template_arguments(tokenizer, arguments)
    return Prompts(tokenizer, positions)


def _answer(prompts: Prompts, ask: Ask, system: str | None, mode: Mode | None) -> dict[str, object]:
    try:
        return {"ids": prompts.ids(ask, system, mode)}
    except SpardError as error:
        return {"ids": None, "code": error.code, "message": error.message}
