"""The memory plan of a training: how it is divided to fit its GPUs, computed before the first step.

Needs neither torch nor a GPU: the API estimates a job when it is created, and the training process plans again when the
rows are known. A plan affects the numbers of a run only by rounding (except for NF4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from spard.config import OptimizerName, Quantization, Quantizes
from spard.models import memory
from spard.models.memory import Trained
from spard.models.shapes import Shape

GIB = 1 << 30
_CONTEXT = 3 * GIB // 2  # bytes of CUDA, its libraries and buffers in each process
_FRAGMENTS = 0.06  # share of the GPU lost to fragmentation
_NAMES: Mapping[Quantization, str] = {"nf4": "NF4", "nf4_double": "NF4 with double quantization"}
_ENOUGH = 2048  # padded tokens that saturate a GPU: passes this large need no checkpointing


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a job: `count` in total, on `machines` machines, each with `memory_bytes` as the driver reports them.

    shards     "if_needed": shard a model that one GPU does not hold, over one machine first, then over all;
               "always": over one machine
    quantizes  "if_needed": hold a frozen model in NF4 if the GPUs do not hold it otherwise, sharded or not
    """

    memory_bytes: int
    count: int = 1
    machines: int = 1
    shards: Literal["never", "if_needed", "always"] = "never"
    quantizes: Quantizes = "never"

    @property
    def usable(self) -> int:
        """Bytes of one GPU that tensors may occupy."""
        return int(self.memory_bytes * (1 - _FRAGMENTS)) - _CONTEXT


@dataclass(frozen=True, slots=True)
class Load:
    """The input of one training step.

    rows           rows of a batch
    longest        tokens of the longest row or of the anchor's longest prompt, whose passes are no larger
    safe_tokens    padded tokens of a safe batch, which is divided like the batch
    answers        2 for preference pairs, whose two answers both go through the model
    checkpointing  True if the recipe asks for activation checkpointing
    """

    rows: int
    longest: int
    safe_tokens: int = 0
    answers: int = 1
    checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a training is divided. `peak_bytes` is per GPU; if `fits` is False it is the least that suffices.

    micro_batch_size, pass_tokens  None: the batch goes through in one piece
    ranks                          number of GPUs that train together
    """

    fits: bool
    gradient_checkpointing: bool
    micro_batch_size: int | None
    pass_tokens: int | None
    sharding: Literal["none", "full", "hybrid"]
    quantization: Quantization
    optimizer: OptimizerName
    ranks: int
    weights_bytes: int
    saved_bytes: int
    peak_bytes: int
    memory_bytes: int

    @property
    def sentence(self) -> str:
        """The plan as a sentence for people."""
        has = f"{_gib(self.peak_bytes)} of {_gib(self.memory_bytes)} GPU memory"
        if not self.fits:
            return f"Memory: not enough, {has} are needed at least"
        pieces = "batches in one piece"
        if self.micro_batch_size is not None:
            rows = f"{self.micro_batch_size} row{'s' if self.micro_batch_size > 1 else ''}"
            pieces = f"pieces of {rows}, {self.pass_tokens} padded tokens at most"
        parts = [pieces, *(["activation checkpointing"] if self.gradient_checkpointing else [])]
        if self.quantization != "none":
            parts.append(f"the model in {_NAMES[self.quantization]}")
        if self.optimizer == "adamw_8bit":
            parts.append("moments of AdamW in 8 bits")
        if self.ranks > 1:
            shared = "" if self.sharding == "none" else f", the model sharded ({self.sharding})"
            parts.append(f"{self.ranks} GPUs{shared}")
        return f"Memory: {has} planned; {', '.join(parts)}"

    def to_json(self) -> dict[str, bool | int | str | None]:
        """Return the plan in the form of the manifest's JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory for a job, with one row at a time.

    alone   bytes of a single GPU that trains alone
    shared  the part of `alone` that can be sharded: the model's frozen or trained weights, less the layers that each
            GPU gathers while it computes. The estimate is exact for two GPUs and an upper bound for more.
    """

    alone: int
    shared: int

    def bytes_per_gpu(self, gpus: int) -> int:
        """Return the bytes that each of `gpus` GPUs needs if they shard the model."""
        return self.alone - self.shared * (gpus - 1) // gpus


def fit(shape: Shape, trained: Trained, load: Load, gpus: Gpus) -> Plan:
    """Return the plan with the least intrusive changes that fits the GPUs.

    Options in order: the whole batch as asked; smaller pieces, while a pass keeps a GPU busy; activation checkpointing,
    which costs about a third more compute; sharding over one machine, then over all (if allowed); NF4, which changes
    the model (if allowed). If nothing fits, the last plan is returned with `fits=False`.
    """
    for held, parts in _ways(trained, gpus):
        # Without sharding, ranks beyond the number of rows have nothing to compute.
        ranks = gpus.count if parts > 1 else min(gpus.count, load.rows)
        share = replace(load, rows=-(-load.rows // ranks))
        for checkpointing in (False, True):
            if checkpointing or not load.checkpointing:
                plan = _cut(shape, held, share, gpus, ranks, parts=parts, checkpointing=checkpointing)
                if plan.fits:
                    return plan
    return plan


def _ways(trained: Trained, gpus: Gpus) -> Iterator[tuple[Trained, int]]:
    """Yield the allowed ways to hold the model, least intrusive first: what is trained, and the number of shards."""
    inside = gpus.count // gpus.machines
    holds = {"never": (False,), "if_needed": (False, True), "always": (True,)}
    cuts = {"never": (1,), "if_needed": tuple(dict.fromkeys((1, inside, gpus.count))), "always": (inside,)}
    is_frozen = trained.lora is not None
    for is_quantized in holds[gpus.quantizes] if is_frozen and trained.quantization == "none" else (False,):
        held = replace(trained, quantization="nf4_double") if is_quantized else trained
        for parts in cuts[gpus.shards] if _is_cuttable(held) else (1,):
            yield held, parts


def _is_cuttable(trained: Trained) -> bool:
    """Return True if the model can be sharded: neither NF4 nor 8-bit moments can."""
    return trained.quantization == "none" and trained.optimizer == "adamw"


def need(shape: Shape, trained: Trained, longest: int, answers: int = 1) -> Need:
    """Return the least memory of a training whose longest row has `longest` tokens."""
    peak = _peak(shape, trained, longest * answers, checkpointing=True, ranks=1)
    shared = max(0, _split(shape, trained) - 2 * _gathered_bytes(shape, trained))
    # Inverse of `Gpus.usable`: the smallest GPU whose usable memory holds the peak.
    return Need(int((peak + _CONTEXT) / (1 - _FRAGMENTS)) + 1, int(shared / (1 - _FRAGMENTS)))


def _cut(
    shape: Shape, trained: Trained, load: Load, gpus: Gpus, ranks: int, *, parts: int, checkpointing: bool
) -> Plan:
    """Return the plan with the largest pieces that fit; without checkpointing they must keep a GPU busy.

    `sharding` is "hybrid" if the model is sharded within each machine: only adapter gradients cross the network then.
    """
    row = load.longest * load.answers
    whole = load.rows * row
    most = max(whole, load.safe_tokens)
    tokens = _most_tokens(shape, trained, gpus.usable, most, parts, checkpointing=checkpointing)
    enough = row if checkpointing else max(row, min(_ENOUGH, whole))
    fits = tokens >= enough
    is_cut = tokens < most
    passed = max(tokens, row) if is_cut else most
    return Plan(
        fits=fits,
        gradient_checkpointing=checkpointing,
        micro_batch_size=max(1, min(load.rows, tokens // row)) if is_cut else None,
        pass_tokens=max(tokens, row) if is_cut else None,
        sharding="none" if parts == 1 else "full" if parts == gpus.count else "hybrid",
        quantization=trained.quantization,
        optimizer=trained.optimizer,
        ranks=ranks,
        weights_bytes=memory.weights(shape, trained) // parts,
        saved_bytes=memory.activation_bytes(shape, trained, passed, checkpointing=checkpointing),
        peak_bytes=_peak(shape, trained, passed, checkpointing=checkpointing, ranks=parts) + _CONTEXT,
        memory_bytes=gpus.memory_bytes,
    )


def _most_tokens(shape: Shape, trained: Trained, usable: int, whole: int, ranks: int, *, checkpointing: bool) -> int:
    """Return the largest pass, in padded tokens up to `whole`, whose peak memory fits in `usable`; 0 if none fits."""
    low, high = 0, whole
    while low < high:
        middle = (low + high + 1) // 2
        if _peak(shape, trained, middle, checkpointing=checkpointing, ranks=ranks) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def _peak(shape: Shape, trained: Trained, tokens: int, *, checkpointing: bool, ranks: int) -> int:
    """Return the peak bytes of tensors on one of `ranks` GPUs that shard the model."""
    split = _split(shape, trained)
    return (
        memory.weights(shape, trained)
        + memory.twin(shape, trained)
        + memory.trained_state(shape, trained)
        - split * (ranks - 1) // ranks
        + (_gathered_bytes(shape, trained) if ranks > 1 else 0)
        + memory.activation_bytes(shape, trained, tokens, checkpointing=checkpointing)
        + memory.work(shape, trained, tokens, checkpointing=checkpointing)
        + memory.dequantized_bytes(shape, trained)
    )


def _split(shape: Shape, trained: Trained) -> int:
    """Return the bytes that can be sharded: frozen weights; for full fine-tuning also moments and twin. 0 if none."""
    if not _is_cuttable(trained):
        return 0
    weights = memory.weights(shape, trained)
    return weights if trained.lora else weights + memory.twin(shape, trained) + memory.trained_state(shape, trained)


def _gathered_bytes(shape: Shape, trained: Trained) -> int:
    """Return the bytes that each GPU gathers of a sharded model: one layer, and the next one in advance."""
    return 2 * shape.layer_parameters * (memory.weights(shape, trained) // shape.parameters)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
