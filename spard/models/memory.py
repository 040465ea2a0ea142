"""Formulas for the GPU memory of a training, from the shape of its model; needs no torch.

On a GPU products are computed in bfloat16 (autocast), and frozen base weights are bfloat16. The tensors saved for the
backward pass were counted with PyTorch's fake tensors (`torch._subclasses.FakeTensorMode` with hooks on saved tensors)
on Llama, Qwen 2.5 and Qwen 3 in transformers 5; `tests/spard/test_fit.py` compares the formulas with these counts. For
activations and checkpointing see Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022); for gradients and moments Rajbhandari et al., "ZeRO" (2020). Attention is assumed to be fused (Dao et al.,
"FlashAttention", 2022): nothing grows with the square of the row length.
"""

from __future__ import annotations

from dataclasses import dataclass

from spard.config import Lora, OptimizerName, Quantization, Recipe
from spard.models.shapes import Shape

_HALF, _SINGLE = 2, 4  # bytes of a number in bfloat16 and in float32
_BLOCK = 256  # 8-bit moments per scale
_NF4_BLOCK, _SCALES_BLOCK = 64, 256  # weights per scale, scales per second-level scale
_CHUNK = 2**27  # logits held at once, in elements: `spard.losses.cross_entropy`
_LOGIT = 2 * _HALF + 3 * _SINGLE  # a logit and its gradient, both also in float32, and its logarithm


@dataclass(frozen=True, slots=True)
class Trained:
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
    def from_recipe(cls, recipe: Recipe) -> Trained:
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


def weights(shape: Shape, trained: Trained) -> int:
    """Return the bytes of the model's own weights: bfloat16 if frozen, float32 if trained.

    With NF4 the linear layers have 4 bits per weight; embeddings, norms and head stay in bfloat16.
    """
    held = shape.parameters * (_SINGLE if trained.lora is None else _HALF)
    quantized = quantized_parameters(shape)
    return held if trained.quantization == "none" else held - quantized * _HALF + nf4(quantized, trained.quantization)


def twin(shape: Shape, trained: Trained) -> int:
    """Return the bytes of the untrained copy of the model, 0 if there is none."""
    return weights(shape, trained) if trained.has_twin else 0


def quantized_parameters(shape: Shape) -> int:
    """Return the number of weights that NF4 holds: all linear layers except the head."""
    return sum(shape.quantizable)


def nf4(parameters: int, quantization: Quantization) -> int:
    """Return the bytes of weights in NF4: half a byte each, plus a scale per block (float32, or 8 bits if double)."""
    blocks = -(-parameters // _NF4_BLOCK)
    scales = blocks + -(-blocks // _SCALES_BLOCK) * _SINGLE if quantization == "nf4_double" else blocks * _SINGLE
    return -(-parameters // 2) + scales


def dequantized_bytes(shape: Shape, trained: Trained) -> int:
    """Return the bytes of the largest layer while its NF4 weights are dequantized."""
    if trained.quantization == "none":
        return 0
    return _HALF * max(shape.quantizable, default=0)


def trained_state(shape: Shape, trained: Trained) -> int:
    """Return the bytes of gradients, moments and further copies, and of an adapter's own weights."""
    each = _SINGLE + trained.copies * _SINGLE + (_SINGLE if trained.lora else 0)
    count = trained.parameters(shape)
    return count * each + moments(count, trained.optimizer)


def moments(parameters: int, optimizer: OptimizerName) -> int:
    """Return the bytes of AdamW's two moments: float32, or 8 bits with a float32 scale per block.

    bitsandbytes keeps small parameters (norms, biases) in float32; that is not counted.
    """
    if optimizer == "adamw":
        return 2 * _SINGLE * parameters
    return 2 * (parameters + -(-parameters // _BLOCK) * _SINGLE)


def saved_per_token(shape: Shape, trained: Trained) -> int:
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


def activation_bytes(shape: Shape, trained: Trained, tokens: int, *, checkpointing: bool) -> int:
    """Return the bytes that the decoder saves for the backward pass of `tokens` padded tokens.

    With checkpointing that is each layer's input, in bfloat16 after a frozen embedding, else in float32. Without it,
    autocast also keeps bfloat16 copies of the trained weights until the end of the backward pass.
    """
    wide = _SINGLE if trained.lora is None else _HALF
    last = (_SINGLE + wide if trained.lora is None else _SINGLE) * shape.hidden + _SINGLE  # the final norm
    if checkpointing:
        return tokens * (shape.layers * wide * shape.hidden + last)
    casts = _HALF * (trained.parameters(shape) if trained.lora else shape.layers * shape.layer_parameters)
    return tokens * (shape.layers * saved_per_token(shape, trained) + last) + casts


def work(shape: Shape, trained: Trained, tokens: int, *, checkpointing: bool) -> int:
    """Return the peak bytes of temporaries: the larger of the logits and one layer's backward pass.

    All `tokens` are assumed to have a label. A layer holds gradients as wide as its MLP; a checkpointed layer is
    recomputed first, which adds its saved tensors.
    """
    logits = min(tokens * shape.vocab, _CHUNK + shape.vocab) * _LOGIT
    layer = tokens * (3 * _HALF * shape.inner + 2 * _SINGLE * shape.hidden)
    if checkpointing:
        layer += tokens * saved_per_token(shape, trained)
    return max(logits, layer)
