"""The engines that can generate audit replies here, and the identity by which their results are kept apart."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from spard.config.checks import vllm_version
from spard.models.base import Base
from spard.models.sharding import is_sharded

MAX_RANK = 512
_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_RANK)  # the values that vLLM accepts for max_lora_rank


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of an audit's replies; `gpus` is the tensor-parallel size.

    Results of different engines, or of different versions of one, are never compared.
    """

    name: Literal["transformers", "vllm"]
    version: str
    gpus: int = 1


def transformers() -> Engine:
    """Return the engine that is always available."""
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
