"""The setting of how a base model's frozen weights are stored. Imports the standard library only."""

from __future__ import annotations

from typing import Literal, TypeAlias

from spard.errors import InvalidRecipe

Quantization: TypeAlias = Literal["none", "nf4", "nf4_double"]
"""none: weights as loaded; nf4: 4 bits per weight and one float32 scale per 64 weights; nf4_double: scales in 8
bits."""

Quantizes: TypeAlias = Literal["never", "if_needed", "always"]
"""When to hold a model's weights in NF4. if_needed: only if they fit no available GPU otherwise."""

OFFERED: Quantization = "nf4_double"
"""The format of a provider's model if it is quantized."""

_PARAM = "recipe.quantization"


def check_quantization(quantization: Quantization, *, has_lora: bool, is_sharded: bool, plain_for: str | None) -> None:
    """Raise `InvalidRecipe` if the run cannot use quantized weights.

    `plain_for` names a defense that needs plain ones.
    """
    if quantization == "none":
        return
    if not has_lora:
        message = f"{_PARAM}: full fine-tuning trains the weights themselves, and those of {quantization} are frozen"
        raise InvalidRecipe(message, _PARAM)
    if is_sharded:
        raise InvalidRecipe(f"{_PARAM}: weights in {quantization} are not cut over GPUs; set sharding = none", _PARAM)
    if plain_for:
        message = f"{_PARAM}: the defense {plain_for} compares the base model's own weights; set quantization = none"
        raise InvalidRecipe(message, _PARAM)


def quantized_digest(plain: str, quantization: Quantization) -> str:
    """Return the digest of a model whose files have the digest `plain`; quantized, it is a different model."""
    return plain if quantization == "none" else f"{plain}+{quantization}"


def plain_digest(digest: str) -> str:
    """Return the digest of a base model's files, given its digest with or without quantization."""
    return digest.partition("+")[0]
