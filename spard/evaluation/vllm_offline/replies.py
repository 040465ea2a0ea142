"""All replies of an audit by vLLM, or none: probe, generate every reply, probe again, end the process.

Sampled prompts and prompts scored by likelihood always go to transformers: its samples depend on the prompt alone, and
vLLM's engine here returns no likelihood of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spard import distributed
from spard.config import AuditEngine
from spard.config.extensions import LIKELIHOOD_SCORERS
from spard.data.rows import Prompt
from spard.evaluation.ask import Batch, Speaker, as_asked
from spard.evaluation.vllm_offline import probe
from spard.evaluation.vllm_offline.engine import Engine, room_for_rank
from spard.evaluation.vllm_offline.probe import Probe
from spard.evaluation.vllm_offline.process import EngineFailed, Process
from spard.models.adapters import lora_rank, save_lora
from spard.models.base import Base
from spard.models.devices import free_share, offload
from spard.models.generate import reply_end_tokens
from spard.models.peft import PeftModel

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
    expected = probe.choose_prompts(subject.model, rows) if is_first else None
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

    def write(prompts: Sequence[Prompt], max_new_tokens: int) -> Iterator[Batch]:
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
    expected: probe.Answers,
    rows: Sequence[Row],
    limits: Limits,
) -> tuple[Replies, Probe]:
    has_adapter, tolerance = expected.adapter is not None, probe.dtype_tolerance(subject.base.model.dtype)

    def probe_engine() -> Probe:
        base = process.first_tokens(prompts, probe.TOP, with_adapter=False)
        own = process.first_tokens(prompts, probe.TOP, with_adapter=True) if has_adapter else None
        return probe.compare_answers(probe.Answers(base, own), expected, tolerance)

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
