"""The plan of a training's memory, made before its first step: how it is cut so that it fits its GPUs.

Nothing here needs torch or a GPU: the service plans a job when it is filed, and its child again when the rows are
known. What a plan changes rounds the numbers of a run and nothing else.
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
_CONTEXT = 3 * GIB // 2  # of CUDA, its libraries and their buffers, in each process
_FRAGMENTS = 0.06  # of the GPU: what an allocator holds and cannot give out
_NAMES: Mapping[Quantization, str] = {"nf4": "NF4", "nf4_double": "NF4 with double quantization"}
_ENOUGH = 2048  # padded tokens of a pass from which a GPU is busy: passes so large are not worth checkpointing


@dataclass(frozen=True, slots=True)
class Gpus:
    """What a job may have: `count` GPUs of `memory_bytes` each, as the driver tells, on so many machines.

    shards     whether a model is cut over them: "if_needed" where one of them does not hold it, then over those of one
               machine, and over all where these do not; "always" over those of one machine
    quantizes  whether a frozen model is held in NF4: "if_needed" where they do not hold it otherwise, cut or not
    """

    memory_bytes: int
    count: int = 1
    machines: int = 1
    shards: Literal["never", "if_needed", "always"] = "never"
    quantizes: Quantizes = "never"

    @property
    def usable(self) -> int:
        """Bytes of one GPU that tensors may take."""
        return int(self.memory_bytes * (1 - _FRAGMENTS)) - _CONTEXT


@dataclass(frozen=True, slots=True)
class Load:
    """What goes through the model in one step.

    rows           of a batch
    longest        tokens of the longest row, or of the anchor's longest prompt; these go through in passes no larger
    safe_tokens    padded tokens of a safe batch, which is cut as a batch is
    answers        2 for preference pairs, which go through with both
    checkpointing  it was asked for, whether it is needed or not
    """

    rows: int
    longest: int
    safe_tokens: int = 0
    answers: int = 1
    checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a training is cut. `peak_bytes` is of one GPU; where `fits` is false it is the least that would do.

    micro_batch_size, pass_tokens  None: the batch goes in one piece
    ranks                          how many GPUs train together
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
        """The plan as a person reads it."""
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
        """Return the plan as the manifest has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory that a job can be trained in, one row at a time.

    alone   bytes of a GPU that trains it by itself
    shared  those of them that GPUs can share out between them: of the model's frozen or trained weights, less the
            layers that each GPU makes whole while it computes. Of two GPUs the need is exact; of more it is at most
            those layers too large, never too small.
    """

    alone: int
    shared: int

    def bytes_per_gpu(self, gpus: int) -> int:
        """Return the bytes of each of `gpus` GPUs that share out the model."""
        return self.alone - self.shared * (gpus - 1) // gpus


def fit(shape: Shape, trained: Trained, load: Load, gpus: Gpus) -> Plan:
    """Choose how a training is cut: on the fewest changes to what was asked that its GPUs have room for.

    The whole batch, as asked; smaller pieces, while a pass keeps a GPU busy; checkpointing, which costs about a third
    more work; where one GPU does not hold the model, those of a machine together or all of them, if it may be cut; and
    NF4, which makes another model of it, if it may be held so. A plan that does not fit says what is needed at least.
    """
    for held, parts in _ways(trained, gpus):
        ranks = gpus.count if parts > 1 else min(gpus.count, load.rows)
        share = replace(load, rows=-(-load.rows // ranks))
        for checkpointing in (False, True):
            if checkpointing or not load.checkpointing:
                plan = _cut(shape, held, share, gpus, ranks, parts=parts, checkpointing=checkpointing)
                if plan.fits:
                    return plan
    return plan


def _ways(trained: Trained, gpus: Gpus) -> Iterator[tuple[Trained, int]]:
    """Yield how the model may be held, and in how many parts, what changes least first."""
    inside = gpus.count // gpus.machines
    holds = {"never": (False,), "if_needed": (False, True), "always": (True,)}
    cuts = {"never": (1,), "if_needed": tuple(dict.fromkeys((1, inside, gpus.count))), "always": (inside,)}
    is_frozen = trained.lora is not None
    for is_quantized in holds[gpus.quantizes] if is_frozen and trained.quantization == "none" else (False,):
        held = replace(trained, quantization="nf4_double") if is_quantized else trained
        for parts in cuts[gpus.shards] if _is_cuttable(held) else (1,):
            yield held, parts


def _is_cuttable(trained: Trained) -> bool:
    """Whether GPUs can share out the model: not in NF4, and not with moments in 8 bits."""
    return trained.quantization == "none" and trained.optimizer == "adamw"


def need(shape: Shape, trained: Trained, longest: int, answers: int = 1) -> Need:
    """Return the least memory of a training whose longest row has so many tokens: what `fit` finds enough for it."""
    peak = _peak(shape, trained, longest * answers, checkpointing=True, ranks=1)
    shared = max(0, _split(shape, trained) - 2 * _gathered_bytes(shape, trained))
    return Need(int((peak + _CONTEXT) / (1 - _FRAGMENTS)) + 1, int(shared / (1 - _FRAGMENTS)))


def _cut(
    shape: Shape, trained: Trained, load: Load, gpus: Gpus, ranks: int, *, parts: int, checkpointing: bool
) -> Plan:
    """Return the plan with the largest pieces that fit; without checkpointing they have to keep a GPU busy.

    Where the model is cut over the GPUs of one machine, nothing but an adapter is sent between machines.
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
    """Return the most padded tokens of a pass, up to `whole`, whose peak is usable; 0 where not even one is."""
    low, high = 0, whole
    while low < high:
        middle = (low + high + 1) // 2
        if _peak(shape, trained, middle, checkpointing=checkpointing, ranks=ranks) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def _peak(shape: Shape, trained: Trained, tokens: int, *, checkpointing: bool, ranks: int) -> int:
    """Return the bytes of tensors on one of `ranks` GPUs that share out the model, at their most."""
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
    """Return the bytes that GPUs can share out: a frozen model's weights, of a trained one its moments and twin too.

    What has weights in NF4, or moments in 8 bits, is not cut.
    """
    if not _is_cuttable(trained):
        return 0
    weights = memory.weights(shape, trained)
    return weights if trained.lora else weights + memory.twin(shape, trained) + memory.trained_state(shape, trained)


def _gathered_bytes(shape: Shape, trained: Trained) -> int:
    """Return the bytes of what each GPU makes whole of a model that is cut: a layer, and the next one meanwhile."""
    return 2 * shape.layer_parameters * (memory.weights(shape, trained) // shape.parameters)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
