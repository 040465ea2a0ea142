"""The engines that can generate audit replies here, and the child process in which vLLM runs.

An engine's identity keeps its results apart from those of others. If vLLM crashes, leaks or hangs, ending its process
frees the GPUs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import IO, Literal, Self, cast

from spard.config import AuditEngine
from spard.config.checks import vllm_version
from spard.evaluation.vllm_offline import vllm_alone
from spard.evaluation.vllm_offline.vllm_alone import Message
from spard.isolation import sandbox
from spard.models.base import Base
from spard.models.sharding import is_sharded

MAX_RANK = 512
_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_RANK)  # the values that vLLM accepts for max_lora_rank


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that generates the replies of an audit; `gpus` is the tensor-parallel size.

    Results of different engines, or of different versions of one, are never compared.
    """

    name: Literal["transformers", "vllm"]
    version: str
    gpus: int = 1


def transformers() -> Engine:
    """Return the engine `transformers`, which is always available."""
    return Engine("transformers", version("transformers"))


def vllm(base: Base, gpus: int) -> Engine:
    """Return vLLM with the largest tensor-parallel size, up to `gpus`, that divides the model's attention heads."""
    heads = int(base.model.config.get_text_config().num_attention_heads)
    return Engine("vllm", vllm_version() or "", max(n for n in range(1, gpus + 1) if heads % n == 0))


def why_not(base: Base, rank: int | None) -> str | None:
    """Return the reason why vLLM cannot be used for a model with an adapter of this rank; None if it can be tried.

    `rank` is None for a model without an adapter.
    """
    if vllm_version() is None:
        return "vLLM is not installed here"
    if base.quantization != "none":
        return "vLLM would not answer with the very weights that the base model has in NF4"
    if is_sharded(base.model):
        return "the model is cut over several GPUs, and its parts do not make room for vLLM"
    if rank is not None and rank > MAX_RANK:
        return f"vLLM loads no adapter of a rank above {MAX_RANK}"
    return None


def room_for_rank(rank: int) -> int:
    """Return the smallest value of vLLM's `max_lora_rank` for an adapter of this rank."""
    return next(each for each in _RANKS if each >= rank)


Likely = Mapping[int, float]
"""The most likely tokens with their log probabilities, in nats."""

_LOOK_S = 0.1
_END_S = 60.0  # time for its child processes to end
_LOGGED = 4000  # last bytes of a failed process's output that are logged
_OF_RANKS = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")  # vLLM would join our group
_SET = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}

_log = logging.getLogger(__name__)


class EngineFailed(Exception):
    """The engine gave no usable replies; the message names no path and may be shown to customers."""


class Process:
    """A child process with one model and at most one adapter, which ends with the `with` block.

    `go_on` is called repeatedly during every wait and may raise to end it.
    """

    def __init__(self, limits: AuditEngine, go_on: Callable[[], None]) -> None:
        self._limits, self._go_on = limits, go_on
        self._output = TemporaryFile()  # noqa: SIM115 - closed with the block
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        program = [sys.executable, "-P", str(Path(vllm_alone.__file__))]
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            # vLLM starts processes of its own; process_tree ends all of them with this one.
            [*sandbox.python("spard.isolation.process_tree"), str(os.getpid()), *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env={name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)} | _SET,
            start_new_session=True,
        )
        Thread(target=self._read, args=(cast(IO[bytes], self._process.stdout),), daemon=True).start()
        self._writer = Thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _log.error("vLLM's processes did not end within %g s", _END_S)
            self._process.kill()
            self._process.wait()
        if self._writer.ident:
            self._writer.join(_END_S)
        if not self._writer.is_alive():
            with suppress(OSError):  # orders that it has not read are lost, which is harmless
                cast(IO[bytes], self._process.stdin).close()
        self._output.close()

    def load(self, settings: Mapping[str, object], adapter: Path | None) -> None:
        """Load a model; raise `EngineFailed` if it fails or takes longer than `limits.start_s`."""
        self._tell({"kind": "load", "settings": settings, "adapter": str(adapter) if adapter else None})
        self._next_message("loaded", self._limits.start_s, "vLLM did not load the model")

    def first_tokens(self, rows: Sequence[Sequence[int]], top: int, *, with_adapter: bool) -> list[Likely]:
        """Return the `top` likeliest tokens after each row, with log-probabilities; raise `EngineFailed` on failure."""
        self._tell({"kind": "first", "rows": rows, "with_adapter": with_adapter, "top": top})
        found = self._next_message("first", self._limits.stall_s, "vLLM did not answer the probe")["rows"]
        if len(found) != len(rows):
            raise EngineFailed("vLLM answered other prompts than it was asked")
        return [dict(each) for each in found]

    def write(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, ends: Sequence[int], *, with_adapter: bool
    ) -> list[list[int]]:
        """Return the tokens generated after each row, up to an end token or the limit.

        Raises `EngineFailed` if a reply is missing or ends in neither way.
        """
        order = {"rows": rows, "with_adapter": with_adapter, "max_new_tokens": max_new_tokens, "ends": list(ends)}
        self._tell({"kind": "write", **order})
        found = list[list[int]]()
        while len(found) < len(rows):
            more = self._next_message("replies", self._limits.stall_s, "vLLM stopped in the middle of its replies")[
                "rows"
            ]
            if not more:
                raise EngineFailed("vLLM left prompts without a reply")
            found += more
        # vLLM can end a reply for reasons of its own; a shortened reply must not be judged as a whole one.
        whole = (len(each) == max_new_tokens or (each and each[-1] in ends) for each in found)
        if len(found) != len(rows) or not all(whole):
            raise EngineFailed("vLLM gave replies that were cut short")
        return found

    def _tell(self, order: Mapping[str, object]) -> None:
        """Send an order from a thread, since writing blocks while the process does not read."""
        self._writer = Thread(target=self._write, args=(json.dumps(order).encode() + b"\n",), daemon=True)
        self._writer.start()

    def _write(self, line: bytes) -> None:
        stdin = cast(IO[bytes], self._process.stdin)
        with suppress(BrokenPipeError):  # it has ended, which the next message reports
            stdin.write(line)
            stdin.flush()

    def _next_message(self, kind: str, limit_s: float, else_: str) -> Message:
        """Return the next message; raise `EngineFailed` with the text `else_` if it is of another kind or late."""
        line, until = None, time.monotonic() + limit_s
        while line is None:
            self._go_on()
            with suppress(Empty):
                line = self._lines.get(timeout=_LOOK_S)
            if line is None and time.monotonic() > until:
                self._log_output()
                raise EngineFailed(f"{else_} within {limit_s:g} s")
        message: Message = json.loads(line) if line else {"kind": "ended"}
        if message["kind"] == kind:
            return message
        self._log_output()
        raise EngineFailed(f"{else_} ({message.get('error', 'it ended')})")

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(b"")

    def _log_output(self) -> None:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - _LOGGED))
        _log.error("vLLM said at last: %s", self._output.read().decode(errors="replace"))
