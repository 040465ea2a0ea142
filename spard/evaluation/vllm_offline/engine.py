"""Which engines can write the replies of an audit here, and what tells their figures apart."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from spard.config.audit_engine import vllm_version
from spard.models.base import Base
from spard.models.sharding import is_sharded

MAX_RANK = 512
_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_RANK)  # what vLLM's max_lora_rank may be


@dataclass(frozen=True, slots=True)
class Engine:
    """What wrote an audit's replies; `gpus` is how many held one model.

    Figures of two engines, or of two versions of one, are not compared with each other.
    """

    name: Literal["transformers", "vllm"]
    version: str
    gpus: int = 1


def transformers() -> Engine:
    """Return the engine that is always there."""
    return Engine("transformers", version("transformers"))


def vllm(base: Base, gpus: int) -> Engine:
    """Return vLLM with the largest tensor-parallel size, up to `gpus`, that divides the model's attention heads."""
    heads = int(base.model.config.get_text_config().num_attention_heads)
    return Engine("vllm", vllm_version() or "", max(n for n in range(1, gpus + 1) if heads % n == 0))


def why_not(base: Base, rank: int | None) -> str | None:
    """Return why vLLM cannot answer for a model with an adapter of a rank (None: without); None if it may be tried."""
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
    """Return the smallest rank that vLLM can be told to make room for, for an adapter of a rank."""
    return next(each for each in _RANKS if each >= rank)
