"""The GPU memory of a training: formulas from the shape of its model, and the plan that makes it fit.

Needs neither torch nor a GPU: the API estimates a job when it is created, and the training process plans again when the
rows are known. A plan affects the numbers of a run only by rounding (except for NF4).

On a GPU products are computed in bfloat16 (autocast), and frozen base weights are bfloat16. The tensors saved for the
backward pass were counted with PyTorch's fake tensors (`torch._subclasses.FakeTensorMode` with hooks on saved tensors)
on Llama, Qwen 2.5 and Qwen 3 in transformers 5; `tests/spard/test_fit.py` compares the formulas with these counts. For
activations and checkpointing see Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022); for gradients and moments Rajbhandari et al., "ZeRO" (2020). Attention is assumed to be fused (Dao et al.,
"FlashAttention", 2022): nothing grows with the square of the row length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from spard.config import Lora, OptimizerName, Quantization, Quantizes, Recipe
from spard.models.shapes import Shape

_HALF, _SINGLE = 2, 4  # bytes of a number in bfloat16 and in float32
_BLOCK = 256  # 8-bit moments per scale
_NF4_BLOCK, _SCALES_BLOCK = 64, 256  # weights per scale, scales per second-level scale
_CHUNK = 2**27  # logits held at once, in elements: `spard.losses.cross_entropy`
_LOGIT = 2 * _HALF + 3 * _SINGLE  # a logit and its gradient, both also in float32, and its logarithm


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The trained part of a model: an adapter's layers, or everything.

    copies        further float32 vectors of the trained parameters: safe gradient, average, the defense's own
    quantization  quantization of the frozen model's linear layers
    has_twin      True if the model before training is kept beside the trained one; never for adapters, which can be
                  disabled instead
    optimizer     decides the size of the moments
    """

    lora: Lora | None
    copies: int = 1
    quantization: Quantization = "none"
    has_twin: bool = False
    optimizer: OptimizerName = "adamw"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> TrainedPart:
        """Return what a training with this recipe trains: the adapter or all weights, and their further copies.

        A defense that compares models needs one more vector: it keeps the task's gradient while it sums the safe
        gradient.
        """
        vectors = recipe.uses_pool, recipe.ema is not None, recipe.defense.compares_models
        has_twin = recipe.lora is None and recipe.defense.compares_models
        copies = sum(vectors) + recipe.defense.kept_vectors
        return cls(recipe.lora, copies, recipe.quantization, has_twin, recipe.optimizer)

    def targets(self, shape: Shape) -> list[tuple[int, int]]:
        """Return the (input, output) widths of each layer that LoRA adapts."""
        return shape.adapted_sizes(self.lora.target_modules or None) if self.lora else []

    def parameters(self, shape: Shape) -> int:
        """Return the number of trained parameters."""
        if self.lora is None:
            return shape.parameters
        return self.lora.rank * sum(wide + out for wide, out in self.targets(shape))


def weight_bytes(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes of the model's own weights: bfloat16 if frozen, float32 if trained.

    With NF4 the linear layers have 4 bits per weight; embeddings, norms and head stay in bfloat16.
    """
    held = shape.parameters * (_SINGLE if trained.lora is None else _HALF)
    quantized = quantized_parameters(shape)
    return (
        held
        if trained.quantization == "none"
        else held - quantized * _HALF + nf4_bytes(quantized, trained.quantization)
    )


def twin_bytes(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes of the untrained copy of the model, 0 if there is none."""
    return weight_bytes(shape, trained) if trained.has_twin else 0


def quantized_parameters(shape: Shape) -> int:
    """Return the number of weights that NF4 holds: all linear layers except the head."""
    return sum(shape.quantizable)


def nf4_bytes(parameters: int, quantization: Quantization) -> int:
    """Return the bytes of weights in NF4: half a byte each, plus a scale per block (float32, or 8 bits if double)."""
    blocks = -(-parameters // _NF4_BLOCK)
    scales = blocks + -(-blocks // _SCALES_BLOCK) * _SINGLE if quantization == "nf4_double" else blocks * _SINGLE
    return -(-parameters // 2) + scales


def dequantized_bytes(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes of the largest layer while its NF4 weights are dequantized."""
    if trained.quantization == "none":
        return 0
    return _HALF * max(shape.quantizable, default=0)


def state_bytes(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes of gradients, moments and further copies, and of an adapter's own weights."""
    each = _SINGLE + trained.copies * _SINGLE + (_SINGLE if trained.lora else 0)
    count = trained.parameters(shape)
    return count * each + moment_bytes(count, trained.optimizer)


def moment_bytes(parameters: int, optimizer: OptimizerName) -> int:
    """Return the bytes of AdamW's two moments: float32, or 8 bits with a float32 scale per block.

    bitsandbytes keeps small parameters (norms, biases) in float32; that is not counted.
    """
    if optimizer == "adamw":
        return 2 * _SINGLE * parameters
    return 2 * (parameters + -(-parameters // _BLOCK) * _SINGLE)


def saved_bytes_per_token(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes per token that one decoder layer saves for the backward pass.

    D is the hidden width, I the MLP's, Q and K the widths of queries and keys, H the heads. Frozen layers save 8 D + 8
    for the two norms, 6 I for the gated MLP and 4 (Q + K) + 4 H for the attention. LoRA saves the bfloat16 input of
    each adapted layer and r elements more; dropout adds a mask and the masked input. Full fine-tuning saves every
    input: 8 D more for the norms, 10 D + 2 I for the rest.
    """
    masked = _SINGLE if trained.lora and trained.lora.dropout else 0
    rank = trained.lora.rank if trained.lora else 0
    adapted = sum((_HALF + masked) * wide + _HALF * rank for wide, _ in trained.targets(shape)) // shape.layers
    norms = 2 * (_SINGLE * shape.hidden + _SINGLE)
    if shape.layout:
        return norms + adapted + _saved_of_any_kind(shape, is_whole=trained.lora is None)
    mlp = 3 * _HALF * shape.inner
    attention = 2 * _HALF * (shape.queries + shape.keys) + _SINGLE * shape.heads
    if shape.has_normed_heads:
        attention += _SINGLE * (shape.queries + shape.keys + shape.heads + shape.kv_heads)
    if trained.lora is None:
        inputs = 2 * _SINGLE * shape.hidden + 5 * _HALF * shape.hidden + _HALF * shape.inner
        return norms + mlp + attention + inputs
    return norms + mlp + attention + adapted


def _saved_of_any_kind(shape: Shape, *, is_whole: bool) -> int:
    """Return the bytes per token that a layer of unknown architecture saves, without norms and adapter.

    Each linear layer's output is assumed to be saved twice, plus keys and values as wide as the queries, twice. The
    result is above the value for Llama and just above that for Falcon, which repeats keys and values.
    """
    inside = [each for linears in shape.layout.in_stack().values() for each in linears] if shape.layout else []
    outputs = sum(each.outputs for each in inside) // shape.layers + shape.experts
    inputs = sum(each.inputs for each in inside) // shape.layers + shape.experts if is_whole else 0
    return 2 * _HALF * outputs + 4 * _HALF * shape.queries + 2 * _SINGLE * shape.hidden + _HALF * inputs


def activation_bytes(shape: Shape, trained: TrainedPart, tokens: int, *, checkpointing: bool) -> int:
    """Return the bytes that the decoder saves for the backward pass of `tokens` padded tokens.

    With checkpointing that is each layer's input, in bfloat16 after a frozen embedding, else in float32. Without it,
    autocast also keeps bfloat16 copies of the trained weights until the end of the backward pass.
    """
    wide = _SINGLE if trained.lora is None else _HALF
    last = (_SINGLE + wide if trained.lora is None else _SINGLE) * shape.hidden + _SINGLE  # the final norm
    if checkpointing:
        return tokens * (shape.layers * wide * shape.hidden + last)
    casts = _HALF * (trained.parameters(shape) if trained.lora else shape.layers * shape.layer_parameters)
    return tokens * (shape.layers * saved_bytes_per_token(shape, trained) + last) + casts


def work_bytes(shape: Shape, trained: TrainedPart, tokens: int, *, checkpointing: bool) -> int:
    """Return the peak bytes of temporaries: the larger of the logits and one layer's backward pass.

    All `tokens` are assumed to have a label. A layer holds gradients as wide as its MLP; a checkpointed layer is
    recomputed first, which adds its saved tensors.
    """
    logits = min(tokens * shape.vocab, _CHUNK + shape.vocab) * _LOGIT
    layer = tokens * (3 * _HALF * shape.inner + 2 * _SINGLE * shape.hidden)
    if checkpointing:
        layer += tokens * saved_bytes_per_token(shape, trained)
    return max(logits, layer)


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


def fit(shape: Shape, trained: TrainedPart, load: Load, gpus: Gpus) -> Plan:
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


def _ways(trained: TrainedPart, gpus: Gpus) -> Iterator[tuple[TrainedPart, int]]:
    """Yield the allowed ways to hold the model, least intrusive first: what is trained, and the number of shards."""
    inside = gpus.count // gpus.machines
    holds = {"never": (False,), "if_needed": (False, True), "always": (True,)}
    cuts = {"never": (1,), "if_needed": tuple(dict.fromkeys((1, inside, gpus.count))), "always": (inside,)}
    is_frozen = trained.lora is not None
    for is_quantized in holds[gpus.quantizes] if is_frozen and trained.quantization == "none" else (False,):
        held = replace(trained, quantization="nf4_double") if is_quantized else trained
        for parts in cuts[gpus.shards] if _is_cuttable(held) else (1,):
            yield held, parts


def _is_cuttable(trained: TrainedPart) -> bool:
    """Return True if the model can be sharded: neither NF4 nor 8-bit moments can."""
    return trained.quantization == "none" and trained.optimizer == "adamw"


def compute_need(shape: Shape, trained: TrainedPart, longest: int, answers: int = 1) -> Need:
    """Return the least memory of a training whose longest row has `longest` tokens."""
    peak = _peak(shape, trained, longest * answers, checkpointing=True, ranks=1)
    shared = max(0, _split(shape, trained) - 2 * _gathered_bytes(shape, trained))
    # Inverse of `Gpus.usable`: the smallest GPU whose usable memory holds the peak.
    return Need(int((peak + _CONTEXT) / (1 - _FRAGMENTS)) + 1, int(shared / (1 - _FRAGMENTS)))


def _cut(
    shape: Shape, trained: TrainedPart, load: Load, gpus: Gpus, ranks: int, *, parts: int, checkpointing: bool
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
        weights_bytes=weight_bytes(shape, trained) // parts,
        saved_bytes=activation_bytes(shape, trained, passed, checkpointing=checkpointing),
        peak_bytes=_peak(shape, trained, passed, checkpointing=checkpointing, ranks=parts) + _CONTEXT,
        memory_bytes=gpus.memory_bytes,
    )


def _most_tokens(
    shape: Shape, trained: TrainedPart, usable: int, whole: int, ranks: int, *, checkpointing: bool
) -> int:
    """Return the largest pass, in padded tokens up to `whole`, whose peak memory fits in `usable`; 0 if none fits."""
    low, high = 0, whole
    while low < high:
        middle = (low + high + 1) // 2
        if _peak(shape, trained, middle, checkpointing=checkpointing, ranks=ranks) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def _peak(shape: Shape, trained: TrainedPart, tokens: int, *, checkpointing: bool, ranks: int) -> int:
    """Return the peak bytes of tensors on one of `ranks` GPUs that shard the model."""
    split = _split(shape, trained)
    return (
        weight_bytes(shape, trained)
        + twin_bytes(shape, trained)
        + state_bytes(shape, trained)
        - split * (ranks - 1) // ranks
        + (_gathered_bytes(shape, trained) if ranks > 1 else 0)
        + activation_bytes(shape, trained, tokens, checkpointing=checkpointing)
        + work_bytes(shape, trained, tokens, checkpointing=checkpointing)
        + dequantized_bytes(shape, trained)
    )


def _split(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes that can be sharded: frozen weights; for full fine-tuning also moments and twin. 0 if none."""
    if not _is_cuttable(trained):
        return 0
    weights = weight_bytes(shape, trained)
    return weights if trained.lora else weights + twin_bytes(shape, trained) + state_bytes(shape, trained)


def _gathered_bytes(shape: Shape, trained: TrainedPart) -> int:
    """Return the bytes that each GPU gathers of a sharded model: one layer, and the next one in advance."""
    return 2 * shape.layer_parameters * (weight_bytes(shape, trained) // shape.parameters)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
