"""Compile schemas under CPU and memory limits: one process for each request, which then computes the token masks.

llguidance bounds neither the time nor the memory that a schema takes, so none of it runs in the engine. One process,
forked before the model is loaded, has the tokenizer and forks one child for each request. The kernel ends a child that
exceeds its CPU time or memory, and only its request fails.

A child gets the schema as a file and first sends JSON: {"error": null}, or an error and its code. Then each message to
it is a `STEP`: the index of a reply and its newest token, or `FIRST`, or `LAST` for a reply that has ended. It answers
all but `LAST` with the index and the mask of the next token, one bit for each logit, or with the index alone if the
schema has become too costly to follow.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from app.ops.processes import die_with_parent, limit_memory
from spard.models.base import read_tokenizer

STEP = struct.Struct("=ii")
FIRST, LAST = -1, -2
COMPILE_CPU_S, STEP_CPU_S = 2.0, 1.0
_MEMORY = 512 << 20  # bytes that a child may allocate beyond its size at the fork
_GRAMMAR_SYMBOLS, _LEXER_STATES = 200_000, 50_000  # limits of a compiled schema; a state takes one or two KiB
_BEHIND = 5  # nice value of a child, so that the engine goes first
_WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
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
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_WRITTEN)
    except ValueError as error:
        raise Uncompiled(str(error)) from None
    limits = llguidance.LLParserLimits(
        max_grammar_size=_GRAMMAR_SYMBOLS, max_lexer_states=_LEXER_STATES, verbose_errors=False
    )
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise Uncompiled(matcher.get_error())
    return matcher


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
