"""Sampling in which each row has its own seed: its tokens depend neither on the batch nor on other rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pick = Callable[[Tensor, Tensor], Tensor]
"""Takes the logits [B, V] of a batch's next tokens and the indices of their rows in the batch, and returns a token for
each."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples from softmax(logits / temperature); `seeds` has one seed per row."""

    temperature: float
    seeds: Sequence[int]

    def make_picker(self, rows: Sequence[int]) -> Pick:
        """Return a function that samples tokens for these rows, each with its own generator."""
        generators = [torch.Generator().manual_seed(self.seeds[i]) for i in rows]

        def pick(logits_BV: Tensor, row_B: Tensor) -> Tensor:
            # On the CPU, because generators of different devices draw different numbers from the same seed.
            p_BV = torch.softmax(logits_BV.float().cpu() / self.temperature, dim=-1)
            drawn = [
                torch.multinomial(p_V, 1, generator=generators[i]) for p_V, i in zip(p_BV, row_B.tolist(), strict=True)
            ]
            return torch.cat(drawn).to(logits_BV.device)

        return pick


def sample_seed(tokens: Sequence[int], draw: int) -> int:
    """Return the seed of a sample, from the prompt's tokens and the sample's number."""
    return int.from_bytes(hashlib.sha256(repr((list(tokens), draw)).encode()).digest()[:7], "big")
