"""All replies of an audit by vLLM, or none: probe, generate every reply, probe again, end the process.

Sampled prompts and prompts scored by likelihood always go to transformers: its samples depend on the prompt alone, and
vLLM's engine here returns no likelihood of a text.

A probe checks that vLLM computes the same model as transformers, by the first tokens of a few prompts. The distance of
two distributions is the largest difference of a likely token's log-probability, in nats. The adapter's effect on a
prompt is the distance of transformers with and without the adapter; the prompts with the largest effects are used. The
checks: vLLM must be within the tolerance of transformers, with the adapter and without it. For each effect above the
tolerance, vLLM with the adapter must be nearer than half of the effect to transformers with the adapter, and the
adapter's effect in vLLM must be more than half of its effect in transformers. An engine that ignores the adapter, or
loads another one, cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from spard import distributed
from spard.config import AuditEngine
from spard.config.extensions import LIKELIHOOD_SCORERS
from spard.data.rows import Prompt
from spard.evaluation.ask import ReplyBatch, Speaker, as_asked
from spard.evaluation.audit import sample
from spard.evaluation.vllm_offline.engine import Engine, EngineFailed, Likely, Process, room_for_rank
from spard.models.adapters import lora_rank, save_lora
from spard.models.base import Base, disable_adapters
from spard.models.devices import free_share, offload
from spard.models.generate import reply_end_tokens
from spard.models.peft import PeftModel
from spard.models.sharding import inference

PROMPTS = 8
TOP = 20  # likeliest tokens per prompt; vLLM's default limit
_CANDIDATES = 64
_COMPARED = 5  # likeliest tokens of each side that are compared
_TOLERANCE = {torch.float32: 0.02}  # nats
_ROUNDED = 0.25  # nats, for a model that computes in 16 bits

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Answers:
    """The likeliest first tokens of the reply to each prompt, by the base model and, if there is one, the adapter."""

    base: Sequence[Likely]
    adapter: Sequence[Likely] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of a probe, in nats: distance of vLLM to transformers, and of the adapter to the base model."""

    prompts: int
    tolerance: float
    difference: float
    to_base: float | None = None


def choose_prompts(model: Any, rows: Sequence[Tokens]) -> tuple[list[Tokens], Answers]:
    """Return the prompts for the probe, and the first tokens with which transformers answers them."""
    some = sample(rows, _CANDIDATES if isinstance(model, PeftModel) else PROMPTS)
    if not isinstance(model, PeftModel):
        return some, Answers(first_tokens(model, some))
    adapter = first_tokens(model, some)
    with disable_adapters(model):
        base = first_tokens(model, some)
    changed = [distance(*each) for each in zip(adapter, base, strict=True)]
    first = sorted(range(len(some)), key=lambda i: -changed[i])[:PROMPTS]
    return [some[i] for i in first], Answers([base[i] for i in first], [adapter[i] for i in first])


def first_tokens(model: Any, rows: Sequence[Tokens]) -> list[Likely]:
    """Return the `TOP` likeliest tokens after each row with their log-probabilities, by transformers."""
    was_training, found = model.training, list[Likely]()
    model.eval()
    for row in rows:
        with inference(model):
            logits_V = model(input_ids=torch.tensor([list(row)], device=model.device), logits_to_keep=1).logits[0, -1]
            top = logits_V.float().log_softmax(dim=-1).topk(min(TOP, len(logits_V)))
        found.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
    model.train(was_training)
    return found


def dtype_tolerance(dtype: torch.dtype) -> float:
    """Return the allowed distance between vLLM and transformers, in nats, for weights of this dtype."""
    return _TOLERANCE.get(dtype, _ROUNDED)


def compare_answers(found: Answers, expected: Answers, tolerance: float) -> Probe:
    """Return the result of the probe; raise `EngineFailed` unless vLLM agrees with transformers.

    found      first tokens of vLLM.
    expected   first tokens of transformers, for the same prompts.
    tolerance  allowed distance, in nats.
    """
    told = [*found.base, *(found.adapter or ())]
    if not all(len(each) >= _COMPARED and all(map(isfinite, each.values())) for each in told):
        raise EngineFailed("vLLM returned too few log probabilities of its first tokens")
    far = max(distance(*each) for each in zip(found.base, expected.base, strict=True))
    _check_distance(far, tolerance, "the base model's")
    if expected.adapter is None or found.adapter is None:
        return Probe(len(expected.base), tolerance, far)
    cases = zip(found.adapter, expected.adapter, found.base, expected.base, strict=True)
    near, own, wanted = zip(*(_distances(*each) for each in cases), strict=True)
    _check_distance(max(near), tolerance, "the adapter's")
    if not max(wanted) > 0:
        raise EngineFailed("the adapter changes no first token by which vLLM could be checked")
    for i, change in enumerate(wanted):
        # Where the adapter changes less than the tolerance, agreement would prove nothing; the largest change always
        # decides.
        decides = change > tolerance or change == max(wanted)
        if decides and not (near[i] < change / 2 and own[i] > change / 2):
            moves = f"the adapter moves vLLM's first tokens by {own[i]:.2g} nats, and transformers' by {change:.2g}"
            raise EngineFailed(f"{moves}, with {near[i]:.2g} between them")
    return Probe(len(expected.base), tolerance, max(far, *near), max(wanted))


def distance(a: Likely, b: Likely, *others: Likely) -> float:
    """Return the largest difference of a likely token's log-probability, in nats.

    Tokens that are likely in `others` count too. A missing token is at most as likely as the last one that is present.
    """
    every = (a, b, *others)
    tokens = {token for each in every for token in sorted(each, key=lambda token: -each[token])[:_COMPARED]}
    floor = max(min(each.values()) for each in every)
    return max(abs(max(a.get(each, floor), floor) - max(b.get(each, floor), floor)) for each in tokens)


def _distances(own: Likely, expected: Likely, own_base: Likely, base: Likely) -> tuple[float, float, float]:
    """Return three distances: vLLM to transformers, and adapter to base model in vLLM and in transformers."""
    every = (own, expected, own_base, base)
    return distance(own, expected, *every), distance(own, own_base, *every), distance(expected, base, *every)


def _check_distance(far: float, tolerance: float, whose: str) -> None:
    if not far <= tolerance:
        raise EngineFailed(f"vLLM's first tokens are {far:.2g} nats away from {whose}, and {tolerance:g} are allowed")


_MOST_MEMORY, _SPARED = 0.9, 0.05  # shares of a GPU's memory: vLLM's at most, and what is left free

_ON_CPU = 0.5  # share of the free main memory, since other processes run too

Row = tuple[int, ...]
Replies = Mapping[Row, Sequence[int]]
"""Maps a prompt to its reply, both as tokens; the reply's end token is left out."""


_BATCH = 64  # replies of one batch


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is asked: the base model, or the base model with an adapter.

    source   folder or hub id of the base model, with its `revision`.
    adapter  folder from which the adapter was loaded; None: it is saved to a temporary one first.
    """

    base: Base
    model: Any
    source: str
    revision: str | None = None
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of generation: new tokens per reply, timeouts of the engine, and a callback for every wait."""

    max_new_tokens: int
    engine: AuditEngine
    go_on: Callable[[], None] = lambda: None


def is_asked(prompt: Prompt) -> bool:
    """Return True if vLLM can answer a prompt: greedily decoded and not scored by likelihood."""
    return not prompt.temperature and prompt.scorer not in LIKELIHOOD_SCORERS


def prompt_rows(tokenizer: Any, prompts: Sequence[Prompt], system: str | None = None) -> list[Row]:
    """Return the distinct token rows of the prompts that vLLM can answer."""
    rows = as_asked(tokenizer, [each for each in prompts if is_asked(each)], system)
    return list(dict.fromkeys(map(tuple, rows)))


def generate_replies(subject: Subject, engine: Engine, rows: Sequence[Row], limits: Limits) -> tuple[Replies, Probe]:
    """Return the reply to every row and the result of the probe; all ranks must call this, and rank 0 asks.

    The model is moved off the GPU meanwhile. Raises `EngineFailed` if the engine fails, the probe fails before or
    after, or a prompt with its reply exceeds the model's positions.
    """
    base, is_first = subject.base, distributed.rank() == 0
    longest = max(map(len, rows)) + limits.max_new_tokens
    if base.sequence_limit(longest) < longest:
        raise EngineFailed("a prompt with its reply has more tokens than the model has positions")
    # Before the model leaves the GPU.
    expected = choose_prompts(subject.model, rows) if is_first else None
    found, failed = None, ""
    with offload(subject.model), TemporaryDirectory() as folder:
        shares = [share for share in distributed.gather_objects(free_share(base.device)) if share is not None]
        adapter = _adapter(subject, Path(folder)) if is_first else None
        settings = _settings(subject, engine, longest, min(shares, default=None))
        if expected:
            try:
                with Process(limits.engine, limits.go_on) as process:
                    process.load(settings, adapter)
                    found = _ask_engine(process, subject, *expected, rows, limits)
            except EngineFailed as error:
                failed = str(error)
    found, failed = distributed.broadcast_object((found, failed))
    if found is None:
        raise EngineFailed(failed)
    return found


def open_speaker(replies: Replies, tokenizer: Any, system: str | None, own: Speaker) -> Speaker:
    """Return a generator that looks up vLLM's replies; `own` answers the prompts that vLLM does not."""

    def write(prompts: Sequence[Prompt], max_new_tokens: int) -> Iterator[ReplyBatch]:
        told = [i for i, each in enumerate(prompts) if is_asked(each)]
        rows = as_asked(tokenizer, [prompts[i] for i in told], system)
        for start in range(0, len(told), _BATCH):
            found = [replies[tuple(row)] for row in rows[start : start + _BATCH]]
            texts = [text.strip() for text in tokenizer.batch_decode(found)]
            yield told[start : start + _BATCH], texts, [len(each) == max_new_tokens for each in found]
        others = [i for i, each in enumerate(prompts) if not is_asked(each)]
        if others:
            for batch in own.write([prompts[i] for i in others], max_new_tokens):
                places = [others[i] for i in batch[0]]
                if len(batch) > 2:
                    yield places, batch[1], batch[2]
                else:
                    yield places, batch[1]

    return Speaker(write, own.choose)


def _ask_engine(
    process: Process,
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    expected: Answers,
    rows: Sequence[Row],
    limits: Limits,
) -> tuple[Replies, Probe]:
    has_adapter, tolerance = expected.adapter is not None, dtype_tolerance(subject.base.model.dtype)

    def probe_engine() -> Probe:
        base = process.first_tokens(prompts, TOP, with_adapter=False)
        own = process.first_tokens(prompts, TOP, with_adapter=True) if has_adapter else None
        return compare_answers(Answers(base, own), expected, tolerance)

    probe_engine()
    ends = reply_end_tokens(subject.base.model, subject.base.tokenizer)
    found = process.write(rows, limits.max_new_tokens, sorted(ends), with_adapter=has_adapter)
    whole = (reply[:-1] if reply[-1] in ends else reply for reply in found)
    return dict(zip(rows, whole, strict=True)), probe_engine()  # after the last reply it must still pass


def _adapter(subject: Subject, folder: Path) -> Path | None:
    if subject.adapter or not isinstance(subject.model, PeftModel):
        return subject.adapter
    save_lora(subject.model, subject.base.origin, folder)
    return folder


def _settings(subject: Subject, engine: Engine, longest: int, free: float | None) -> dict[str, object]:
    """Return the arguments of `vllm.LLM`; compilation and caches are off, since one audit is too short to profit."""
    model = subject.model
    settings: dict[str, object] = {
        "model": subject.source,
        "revision": subject.revision,
        "tokenizer_revision": subject.revision,
        "dtype": str(subject.base.model.dtype).removeprefix("torch."),
        "load_format": "safetensors",
        "trust_remote_code": False,
        "tensor_parallel_size": engine.gpus,
        "max_model_len": longest,
        "seed": 0,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_custom_all_reduce": True,
    }
    share = _ON_CPU * _free_memory() if free is None else free - _SPARED  # by default vLLM takes nearly all memory
    settings["gpu_memory_utilization"] = round(min(_MOST_MEMORY, share), 3)
    rank = lora_rank(model)
    if rank is not None:
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for_rank(rank)}
    return settings


def _free_memory() -> float:
    """Return the free share of main memory; 0.5 if unknown."""
    try:
        lines = (line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        sizes = {name: int(size.split()[0]) for name, size in lines}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, ValueError, KeyError):
        return 0.5
