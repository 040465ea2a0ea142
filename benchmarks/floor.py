"""The time that the products of a model's layers take, however they are batched: a bound from below."""

from __future__ import annotations

import time

import torch

from spard.models.base import Base


def products(base: Base, tokens: int, *, is_training: bool = False) -> tuple[float, float]:
    """Return the CPU seconds of every layer's weights times `tokens` tokens, and a product's rate in 10^9 operations/s.

    The rate is that of the widest weight times 1,024 tokens, measured now. Training LoRA multiplies each frozen weight
    twice, forward and for the gradient of what goes into it. Attention, the head and the adapter are left out.
    """
    layers = [part for name, part in base.model.named_parameters() if ".layers." in name and part.dim() == 2]
    wide = max(layers, key=lambda part: part.numel()).detach()
    states = torch.ones(1024, wide.shape[1])
    begun = time.process_time()
    for _ in range(100):
        states @ wide.T
    rate = 100 * 2 * 1024 * wide.numel() / (time.process_time() - begun)
    return 2 * (1 + is_training) * tokens * sum(part.numel() for part in layers) / rate, rate / 1e9
