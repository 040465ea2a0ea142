"""Proves a saved adapter before release: another process loads it without our code and must get the same logits.

The tolerance is relative to the largest logit: 1e-4 in float32, where the order of summation is the same, and 0.02 in
bfloat16, which has 8 bits of precision.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from spard import distributed
from spard.data.chat import get_renderer, render_prompt
from spard.data.chat_template import sources
from spard.data.control_tokens import Shield
from spard.data.renderer import self_rendering
from spard.errors import AdapterNotProved
from spard.models.base import Base
from spard.models.devices import offload
from spard.models.peft import PeftModel
from spard.models.sharding import inference, is_sharded
from spard.release import clean_load

MAX_NEW_TOKENS = 128
PROMPTS = 3
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
_LOOK_S = 0.1
_LOGGED = 2000  # bytes of a failed process's output to log

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof. `ends`: a greedy answer to the first prompt ended by itself within the token limit."""

    prompts: int
    max_difference: float  # between the logits of both processes, relative to the largest
    difference_to_base: float  # between adapter and base model, likewise
    ends: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class ProofResult:
    """The clean process's results: logits by name, the tokens of each conversation, and how its answer ended."""

    logits: Mapping[str, Tensor]
    ids: list[list[int]]
    ends: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class Source:
    """The base model's location for the clean process: a folder or hub id, and the revision."""

    model: str
    revision: str | None


class CleanProcess:
    """A Python process with transformers and PEFT and none of our code, used as a context manager.

    `start` or the first request starts it; it loads its libraries and waits, in 350 MB of memory. It ends with the
    block or with its parent. A process that failed or that holds GPU memory is ended after the request; `start` or the
    next request starts another one.
    """

    def __init__(self) -> None:
        self._output = TemporaryFile()  # noqa: SIM115 - closed with the block
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        self._output.close()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process unless it runs, which loads its libraries in advance; return it."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._start()
        return self._process

    def see(self, ask: Mapping[str, object], go_on: Callable[[], None]) -> ProofResult:
        """Send a request and return the result; `go_on` is called while waiting and may raise.

        Raises `AdapterNotProved` if the process fails.
        """
        process = self.start()
        with TemporaryDirectory() as out:
            _send(process, json.dumps({**ask, "out": out}).encode() + b"\n")
            seen = Path(out) / "seen.json"
            # The file may appear just before the process ends, so its existence is checked once more below.
            while not seen.exists() and _is_running(process):
                go_on()
            if not seen.exists():
                self._output.seek(0)
                _log.error("the clean process failed: %s", self._output.read()[-_LOGGED:].decode(errors="replace"))
                raise AdapterNotProved("a clean process with transformers and PEFT alone cannot load it")
            found = ProofResult(load_file(Path(out) / "logits.safetensors"), **json.loads(seen.read_text()))
        if ask["device"] != "cpu":
            self._end()  # returns its GPU memory to the training
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-P", str(Path(clean_load.__file__))],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        with suppress(OSError):  # unread input does not matter
            cast(IO[bytes], process.stdin).close()


def _send(process: subprocess.Popen[bytes], text: bytes) -> None:
    stdin = cast(IO[bytes], process.stdin)
    with suppress(BrokenPipeError):
        stdin.write(text)
        stdin.flush()


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def prove(
    clean: CleanProcess | None,
    model: Any,
    base: Base,
    source: Source,
    folder: Path,
    prompts: Sequence[str],
    go_on: Callable[[], None],
) -> Proof:
    """Prove that the adapter in `folder` is `model` and differs from its base model; return the measured differences.

    `prompts` are user texts, of which the first `PROMPTS` are used; `go_on` is called while waiting. Rank 0 asks its
    clean process and broadcasts the result. Raises `AdapterNotProved`.
    """
    conversations = _conversations(base, prompts)
    rows = [render_prompt(base.tokenizer, messages) for messages in conversations]
    expected, dtype = [_logits(model, row) for row in rows], base.model.dtype
    ask = {
        "adapter": str(folder),
        "base": source.model,
        "revision": source.revision,
        "is_lora": isinstance(model, PeftModel),
        "device": "cpu" if is_sharded(model) else str(base.device),  # one GPU may be too small for it
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": base.stored or base.quantization,
        "conversations": conversations,
        "template_arguments": _template_arguments(base),
        "max_new_tokens": _room(base, rows[0]),
    }
    proof, reason = None, ""
    try:
        if clean:
            # The clean process loads base model and adapter anew and needs the GPU's memory for both.
            with nullcontext() if is_sharded(model) else offload(model):
                seen = clean.see(ask, go_on)
            proof = _compare_logits(seen, rows, expected, _TOLERANCE[dtype])
    except AdapterNotProved as error:
        reason = error.why
    proof, reason = distributed.broadcast_object((proof, reason))
    if proof is None:
        raise AdapterNotProved(reason)
    return proof


def _conversations(base: Base, prompts: Sequence[str]) -> list[list[dict[str, str]]]:
    """Return the prompts as conversations, with control tokens broken up: the clean process has no such protection."""
    shield = Shield(base.tokenizer)
    return [[{"role": "user", "content": shield.insert_spaces(prompt)}] for prompt in prompts[:PROMPTS]]


def _template_arguments(base: Base) -> dict[str, object]:
    """Return the arguments that the archive's chat template needs to render as in training; {} if none."""
    renderer = get_renderer(base.tokenizer)
    mode = renderer.rendering.asked
    is_own = self_rendering(renderer, mode) == sources(renderer.template)
    return renderer.rendering.mode_arguments(mode) if is_own else {}


def _compare_logits(seen: ProofResult, rows: list[list[int]], expected: list[Tensor], tolerance: float) -> Proof:
    if seen.ids != rows:
        raise AdapterNotProved("the packaged tokenizer and chat template give other tokens than those trained with")
    far = max(logit_distance(seen.logits[f"tuned.{i}"], each) for i, each in enumerate(expected))
    to_base = max(logit_distance(seen.logits[f"base.{i}"], each) for i, each in enumerate(expected))
    if not far <= tolerance:
        text = f"loaded with PEFT alone its logits differ from the trained model's by {far:.2g}"
        raise AdapterNotProved(f"{text} of the largest; at most {tolerance:g} may")
    # An adapter that fails to load silently gives the base model's logits, which a small difference alone does not
    # reveal.
    if not to_base > 0:
        raise AdapterNotProved("loaded with PEFT alone it changes nothing: the logits are those of the base model")
    return Proof(len(expected), far, to_base, seen.ends, seen.tokens)


def logit_distance(a_TV: Tensor, b_TV: Tensor) -> float:
    """Return the largest difference relative to the largest logit of the second; inf for different shapes."""
    if a_TV.shape != b_TV.shape:
        return float("inf")
    return float((a_TV - b_TV).abs().max() / b_TV.abs().max())


def _logits(model: Any, row: list[int]) -> Tensor:
    was_training = model.training
    model.eval()
    with inference(model):
        logits_TV: Tensor = model(input_ids=torch.tensor([row], device=model.device)).logits[0]
    model.train(was_training)
    return logits_TV.float().cpu()


def _room(base: Base, row: list[int]) -> int:
    positions = getattr(base.model.config.get_text_config(), "max_position_embeddings", None)
    return max(1, min(MAX_NEW_TOKENS, positions - len(row))) if positions else MAX_NEW_TOKENS
