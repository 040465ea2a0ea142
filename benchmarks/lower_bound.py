"""How long a model's matrix products take: a lower bound on the time of embedding and of training."""

from __future__ import annotations

import time

import torch

from spard.models.base import Base

_FIRST_INPUTS = tuple(f".layers.0.self_attn.{name}_proj." for name in "qkv")  # need no gradient of what goes in


def matmul_seconds(base: Base, tokens: int, *, is_training: bool = False) -> tuple[float, float]:
    """Return the CPU seconds of the layers' matrix products for so many tokens, and their rate in 10^9 operations/s.

    Each weight matrix is multiplied once with all tokens. Training LoRA multiplies it once more, for the gradient of
    its input; the first layer's query, key and value need none. Attention, the head and the adapter are left out. The
    rate is measured now, on the largest matrix and 1,024 tokens.
    """
    layers = {name: part for name, part in base.model.named_parameters() if ".layers." in name and part.dim() == 2}
    backward = {name: part for name, part in layers.items() if not any(each in name for each in _FIRST_INPUTS)}
    weights = [*layers.values(), *(backward.values() if is_training else ())]
    largest = max(weights, key=lambda part: part.numel()).detach()
    states = torch.ones(1024, largest.shape[1])
    begun = time.process_time()
    for _ in range(100):
        states @ largest.T
    rate = 100 * 2 * 1024 * largest.numel() / (time.process_time() - begun)
    return 2 * tokens * sum(part.numel() for part in weights) / rate, rate / 1e9
