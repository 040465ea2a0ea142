"""Sampled tokens that depend on a row's own seed alone: neither on the batch nor on the rows beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pick = Callable[[Tensor, Tensor], Tensor]
"""From the logits (B x V) of a batch's next tokens, and the places of their rows in the batch, to a token each."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws from softmax(logits / temperature); `seeds` has a number for each row."""

    temperature: float
    seeds: Sequence[int]

    def make_picker(self, rows: Sequence[int]) -> Pick:
        """Return what draws the tokens of a batch of these rows, each from a generator of its own."""
        generators = [torch.Generator().manual_seed(self.seeds[i]) for i in rows]

        def pick(logits_BV: Tensor, row_B: Tensor) -> Tensor:
            p_BV = torch.softmax(logits_BV.float().cpu() / self.temperature, dim=-1)
            drawn = [
                torch.multinomial(p_V, 1, generator=generators[i]) for p_V, i in zip(p_BV, row_B.tolist(), strict=True)
            ]
            return torch.cat(drawn).to(logits_BV.device)

        return pick


def sample_seed(tokens: Sequence[int], draw: int) -> int:
    """Return the seed of a sample, from the question's tokens and the sample's number."""
    return int.from_bytes(hashlib.sha256(repr((list(tokens), draw)).encode()).digest()[:7], "big")
