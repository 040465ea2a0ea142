"""Constrain replies to a JSON schema: for each token, mask the logits of tokens that the schema does not allow.

llguidance computes the allowed tokens after each token. It runs in separate processes (`serve_schemas`), so the
engine never waits for a schema, and other rows of the batch are not affected. Exactly one space is allowed after commas
and colons, as `json.dumps` writes it: if any number is allowed, small models write nothing but spaces.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
import socket
import struct
from collections.abc import Callable, Collection
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.inference.json_limits import parts
from app.ops.processes import die_with_parent, limit_memory
from spard.errors import SpardError
from spard.models.base import read_tokenizer
from worker.engine.requests import FairQueue, QueuedRequest

# Compile schemas under CPU and memory limits: one process for each request, which then computes the token masks.
#
# llguidance bounds neither the time nor the memory that a schema takes, so none of it runs in the engine. One
# process, forked before the model is loaded, has the tokenizer and forks one child for each request. The kernel ends
# a child that exceeds its CPU time or memory, and only its request fails.
#
# A child gets the schema as a file and first sends JSON: {"error": null}, or an error and its code. Then each message
# to it is a `STEP`: the index of a reply and its newest token, or `FIRST`, or `LAST` for a reply that has ended. It
# answers all but `LAST` with the index and the mask of the next token, one bit for each logit, or with the index
# alone if the schema has become too costly to follow.

STEP = struct.Struct("=ii")
FIRST, LAST = -1, -2
COMPILE_CPU_S, STEP_CPU_S = 2.0, 1.0
_MEMORY = 512 << 20  # bytes that a child may allocate beyond its size at the fork
_GRAMMAR_SYMBOLS, _LEXER_STATES = 200_000, 50_000  # limits of a compiled schema; a state takes one or two KiB
_BEHIND = 5  # nice value of a child, so that the engine goes first
_WRITTEN: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # Without `u`: llguidance takes the key "\u0061" for another key than "a", and so lets it have any value.
    "json_allowed_escapes": 'nrbtf"\\',
}
_LONG_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")  # of a control character that has no short escape
_HEADER = 1 << 16  # bytes that a request's header has at most


class Header(NamedTuple):
    """The header of a request: the token ids that end a reply, and the model's number of logits."""

    ends: list[int]
    logits: int


class Uncompiled(Exception):
    """llguidance refuses a schema; the text says why."""

    code = "invalid_json_schema"


class Unsupported(Uncompiled):
    """This engine cannot constrain any reply to a schema."""

    code = "unsupported_parameter"


def serve_schemas(requests: socket.socket, source: str, revision: str | None, parent: int) -> None:
    """Run the process that has the tokenizer: fork a child for each request until the engine ends.

    A request is one message on the socket: a JSON `Header`, with the descriptors of the child's connection and of the
    schema's file.
    """
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no one to wait for them
    vocabularies = dict[frozenset[int], Any]()
    own = os.getpid()
    while True:
        line, descriptors, _, _ = socket.recv_fds(requests, _HEADER, 2)
        if not line:
            return
        header = Header(*json.loads(line))
        vocabulary = _vocabulary(vocabularies, source, revision, header)
        if os.fork() == 0:
            try:
                requests.close()
                die_with_parent(own)
                _answer(Connection(descriptors[0]), descriptors[1], vocabulary)
            finally:
                os._exit(0)  # a child must never return into the parent's loop
        for each in descriptors:
            os.close(each)


def compile_schema(vocabulary: Any, schema: str) -> Any:
    """Return llguidance's matcher for a schema; raise `Uncompiled` if llguidance refuses it."""
    import llguidance

    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(_check_enforceable(schema), overrides=_WRITTEN)
    except ValueError as error:
        raise Uncompiled(str(error)) from None
    limits = llguidance.LLParserLimits(
        max_grammar_size=_GRAMMAR_SYMBOLS, max_lexer_states=_LEXER_STATES, verbose_errors=False
    )
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise Uncompiled(matcher.get_error())
    return matcher


def _check_enforceable(schema: str) -> str:
    """Return the schema without llguidance's own options; raise `Uncompiled` if it would be enforced only in part."""
    if _LONG_ESCAPE.search(schema):
        raise Uncompiled("it contains a control character that replies cannot contain")
    checked: dict[str, object] = json.loads(schema)
    checked.pop("x-guidance", None)  # with this key a schema can make llguidance ignore keywords and `_WRITTEN`
    for part in parts(checked):
        least, required = part.get("minProperties"), part.get("required")
        named = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
        is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
        # llguidance lets a key that no keyword names repeat, and counts it each time.
        if isinstance(least, int | float) and least > len(named) + 1 and not is_closed:
            raise Uncompiled("minProperties above 1 needs the keys in `required`, or additionalProperties: false")
    return json.dumps(checked)


def _vocabulary(known: dict[frozenset[int], Any], source: str, revision: str | None, header: Header) -> Any:
    """Return llguidance's form of the tokenizer, cached for each set of end tokens, or the error if there is none."""
    ends = frozenset(header.ends)
    if ends in known:
        return known[ends]
    try:
        from llguidance.hf import from_tokenizer

        tokenizer: Any = read_tokenizer(source, revision)
        known[ends] = from_tokenizer(tokenizer, n_vocab=header.logits, eos_token=sorted(ends))
    except ImportError:
        known[ends] = Unsupported("this engine has no llguidance, which holds replies to a schema")
    except Exception as error:  # a tokenizer of whatever kind: the engine answers without schemas
        known[ends] = Unsupported(f"llguidance cannot read this model's tokenizer: {error}")
    return known[ends]


def _answer(end: Connection, schema_file: int, vocabulary: Any) -> None:
    """Run a child: compile its schema, send the result, and compute masks until the engine closes the connection."""
    os.nice(_BEHIND)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(_address_space() + _MEMORY)
    schema = os.pread(schema_file, os.fstat(schema_file).st_size, 0).decode()
    try:
        if isinstance(vocabulary, Uncompiled):
            raise vocabulary
        _end_with_engine_side(end, is_on=True)
        matcher = _run_limited(COMPILE_CPU_S, lambda: compile_schema(vocabulary, schema))
        _end_with_engine_side(end, is_on=False)
    except Uncompiled as error:
        why = (str(error).splitlines() or [""])[0][:300]
        end.send_bytes(json.dumps({"error": why, "code": error.code}).encode())
        return
    end.send_bytes(b'{"error": null}')
    _follow(end, matcher)


def _end_with_engine_side(end: Connection, *, is_on: bool) -> None:
    """Make the kernel end this process when the engine closes the connection, as it does for a cancelled request.

    A compilation cannot check that itself. The signal is SIGIO, whose default action ends the process; it also comes
    with data, but the engine sends none during a compilation.
    """
    fcntl.fcntl(end.fileno(), fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(end.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(end.fileno(), fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags & ~os.O_ASYNC)
    if is_on and end.poll(0):  # it was closed before the signal was armed
        os._exit(0)


def _follow(end: Connection, matcher: Any) -> None:
    replies = dict[int, Any]()
    while True:
        try:
            index, token = STEP.unpack(end.recv_bytes())
        except EOFError:
            return
        if token == LAST:
            replies.pop(index, None)
            continue
        if token == FIRST:
            replies[index] = matcher.deep_copy()
        end.send_bytes(struct.pack("=i", index) + _run_limited(STEP_CPU_S, lambda: _mask(replies[index], token)))  # noqa: B023


def _mask(matcher: Any, token: int) -> bytes:
    if token != FIRST:
        matcher.consume_token(token)
    mask: bytes = b"" if matcher.is_error() else matcher.compute_bitmask()
    return b"" if matcher.is_error() else mask


def _run_limited(cpu_s: float, work: Callable[[], Any]) -> Any:
    """Return the result of `work`; if it takes more CPU time, SIGPROF, which nothing handles, ends this process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


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
        self._compiling: dict[int, tuple[QueuedRequest, Form]] = {}
        self._followed: dict[int, Form] = {}
        self.logits = 0  # the model's number of logits; set once it is loaded
        self.is_lost = False  # the process that forks the compilers has ended

    @property
    def is_busy(self) -> bool:
        """Return True if a schema waits to be compiled or is being compiled."""
        return bool(self._queue or self._compiling)

    def add(self, waiting: QueuedRequest, ends: Collection[int]) -> None:
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

    def receive(self, timeout_s: float) -> list[tuple[QueuedRequest, Unwritable | None]]:
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
