"""The bytes that a training takes on a GPU, from the shape of its model: formulae, without torch.

On a GPU products are taken in bfloat16 (autocast), and the weights of a frozen base are bfloat16. What is saved for
the backward pass was read off fake tensors of PyTorch (`torch._subclasses.FakeTensorMode` with hooks on saved tensors)
of Llama, Qwen 2.5 and Qwen 3 as transformers 5 computes them, and `tests/spard/test_fit.py` holds the formulae to it.
For the whole and what checkpointing leaves of it see Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022); for gradients and moments beside weights Rajbhandari et al., "ZeRO" (2020). Attention is
taken to be fused (Dao et al., "FlashAttention", 2022): nothing grows with the square of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from spard.config import Lora, OptimizerName, Quantization, Recipe
from spard.models.shapes import Shape

_HALF, _SINGLE = 2, 4  # bytes of a number in bfloat16 and in float32
_BLOCK = 256  # moments in 8 bits with one scale
_NF4_BLOCK, _SCALES_BLOCK = 64, 256  # weights with one scale, scales with one of their own
_CHUNK = 2**27  # logits held at once, in elements: `spard.losses.cross_entropy`
_LOGIT = 2 * _HALF + 3 * _SINGLE  # a logit and its gradient, both also in float32, and its logarithm


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained of a model: the layers of an adapter, or all of it.

    copies        further vectors of the trained parameters in float32: a safe gradient, an average, a defense's own
    quantization  how the linear layers of the frozen model are held
    has_twin      whether the model before training stays beside the one that is trained: never for adapters, which
                  are switched off to look at it
    optimizer     how it holds the moments of the trained parameters
    """

    lora: Lora | None
    copies: int = 1
    quantization: Quantization = "none"
    has_twin: bool = False
    optimizer: OptimizerName = "adamw"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Trained:
        """Return what a recipe trains.

        What compares models holds the task's gradient while that of the safe rows is summed over passes: a vector more.
        """
        vectors = recipe.uses_pool, recipe.ema is not None, recipe.defense.compares_models
        has_twin = recipe.lora is None and recipe.defense.compares_models
        copies = sum(vectors) + recipe.defense.kept_vectors
        return cls(recipe.lora, copies, recipe.quantization, has_twin, recipe.optimizer)

    def targets(self, shape: Shape) -> list[tuple[int, int]]:
        """Return what goes into and comes out of each layer that LoRA adapts."""
        return shape.adapted_sizes(self.lora.target_modules or None) if self.lora else []

    def parameters(self, shape: Shape) -> int:
        """Count the parameters that are trained."""
        if self.lora is None:
            return shape.parameters
        return self.lora.rank * sum(wide + out for wide, out in self.targets(shape))


def weights(shape: Shape, trained: Trained) -> int:
    """Return the bytes of the model's own weights: bfloat16 where they are frozen, float32 where they are trained.

    In NF4 those of linear layers have 4 bits; embeddings, norms and the head do not.
    """
    held = shape.parameters * (_SINGLE if trained.lora is None else _HALF)
    quantized = quantized_parameters(shape)
    return held if trained.quantization == "none" else held - quantized * _HALF + nf4(quantized, trained.quantization)


def twin(shape: Shape, trained: Trained) -> int:
    """Return the bytes of the model before training where it is held beside the trained one, in the same numbers."""
    return weights(shape, trained) if trained.has_twin else 0


def quantized_parameters(shape: Shape) -> int:
    """Count the weights that NF4 holds: of all linear layers but the head."""
    return sum(shape.quantizable)


def nf4(parameters: int, quantization: Quantization) -> int:
    """Return the bytes of weights in NF4: half a byte each, and a scale in float32 for each block, or 8 bits of it."""
    blocks = -(-parameters // _NF4_BLOCK)
    scales = blocks + -(-blocks // _SCALES_BLOCK) * _SINGLE if quantization == "nf4_double" else blocks * _SINGLE
    return -(-parameters // 2) + scales


def dequantized_bytes(shape: Shape, trained: Trained) -> int:
    """Return the bytes at work where weights in NF4 are made numbers again: those of the largest layer, at once."""
    if trained.quantization == "none":
        return 0
    return _HALF * max(shape.quantizable, default=0)


def trained_state(shape: Shape, trained: Trained) -> int:
    """Return the bytes of gradients, moments and further copies, and of an adapter's own weights."""
    each = _SINGLE + trained.copies * _SINGLE + (_SINGLE if trained.lora else 0)
    count = trained.parameters(shape)
    return count * each + moments(count, trained.optimizer)


def moments(parameters: int, optimizer: OptimizerName) -> int:
    """Return the bytes of AdamW's two moments: in float32, or a byte each and a scale in float32 for each block.

    What bitsandbytes keeps in float32, of parameters as small as norms and biases, is not counted.
    """
    if optimizer == "adamw":
        return 2 * _SINGLE * parameters
    return 2 * (parameters + -(-parameters // _BLOCK) * _SINGLE)


def saved_per_token(shape: Shape, trained: Trained) -> int:
    """Return the bytes that one decoder layer saves for the backward pass, for each token.

    Frozen layers save nothing for their weights: 8 D + 8 of the two norms, 6 I of the gated MLP, 4 (Q + K) + 4 H of
    the attention. LoRA saves the input of each layer that it adapts in bfloat16 and r elements more; dropout a mask and
    the masked input. All that is trained in full saves every input: 8 D more of the norms, 10 D + 2 I of the rest.
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
    """Return the bytes that a layer of unknown kind saves for each token, but for its norms and its adapter.

    What each linear layer gives is taken to be saved twice, before and after what is done with it, and keys and values
    as wide as the queries twice more: above what Llama's kind saves, and just above Falcon, which repeats them.
    """
    inside = [each for linears in shape.layout.in_stack().values() for each in linears] if shape.layout else []
    outputs = sum(each.outputs for each in inside) // shape.layers + shape.experts
    inputs = sum(each.inputs for each in inside) // shape.layers + shape.experts if is_whole else 0
    return 2 * _HALF * outputs + 4 * _HALF * shape.queries + 2 * _SINGLE * shape.hidden + _HALF * inputs


def activation_bytes(shape: Shape, trained: Trained, tokens: int, *, checkpointing: bool) -> int:
    """Return the bytes that the decoder saves for the backward pass of `tokens` padded tokens.

    With checkpointing it is the input of each layer, in bfloat16 after a frozen embedding, else in float32. Without,
    autocast keeps trained weights in bfloat16 until the backward pass is over.
    """
    wide = _SINGLE if trained.lora is None else _HALF
    last = (_SINGLE + wide if trained.lora is None else _SINGLE) * shape.hidden + _SINGLE  # the last norm
    if checkpointing:
        return tokens * (shape.layers * wide * shape.hidden + last)
    casts = _HALF * (trained.parameters(shape) if trained.lora else shape.layers * shape.layer_parameters)
    return tokens * (shape.layers * saved_per_token(shape, trained) + last) + casts


def work(shape: Shape, trained: Trained, tokens: int, *, checkpointing: bool) -> int:
    """Return the bytes at work at once beside what is saved: the widest of logits and of one layer's backward pass.

    Of `tokens` all may have a label. A layer holds gradients as wide as its MLP; one that was checkpointed is made
    again whole, before.
    """
    logits = min(tokens * shape.vocab, _CHUNK + shape.vocab) * _LOGIT
    layer = tokens * (3 * _HALF * shape.inner + 2 * _SINGLE * shape.hidden)
    if checkpointing:
        layer += tokens * saved_per_token(shape, trained)
    return max(logits, layer)
