"""Compute the time of a model's matrix products, a lower bound for the time of embedding and training."""

from __future__ import annotations

import time

import torch

from spard.models.base import Base

_FIRST_INPUTS = tuple(f".layers.0.self_attn.{name}_proj." for name in "qkv")  # need no gradient of their input


def matmul_seconds(base: Base, tokens: int, *, is_training: bool = False) -> tuple[float, float]:
    """Return the CPU seconds of the layers' matrix products for `tokens` tokens, and the speed in 10^9 operations/s.

    The forward pass multiplies each weight matrix with all tokens. LoRA training multiplies it once more, for the
    gradient of its input; the first layer's query, key and value projections need none. Attention, the head and the
    adapter are left out. The speed is measured here, on the largest matrix and 1,024 tokens.
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
