"""The safe set: which rows of the safety pool a run defends itself with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from spard import dpp
from spard.config import Selection


@dataclass(frozen=True, slots=True)
class Chosen:
    """Pool rows in the order chosen, the relevance of each, and for the DPP its gain until the rank was reached."""

    indices: list[int]
    relevance: list[float]
    gains: list[float | None]
    rank: int | None  # None: the method knows no rank


def choose(pool_ND: Tensor, task_MD: Tensor, k: int, selection: Selection, seed: int) -> Chosen:
    """Choose k pool rows for a task, exact copies only when distinct rows run out; `seed` serves `random` alone."""
    quality_N = dpp.quality(pool_ND, task_MD)
    match selection.method:
        case "relevance_diversity":
            picked = dpp.greedy(pool_ND, quality_N, k, selection.beta)
            gains = [*picked.gains, *[None] * (len(picked.indices) - picked.rank)]
            return Chosen(picked.indices, picked.relevance, gains, picked.rank)
        case "random":
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(pool_ND), generator=generator)
        case "max_quality":
            order = quality_N.sort(descending=True, stable=True).indices
        case "low_similarity":
            order = quality_N.sort(stable=True).indices
        case other:
            assert_never(other)
    return _chosen(dpp.fill(pool_ND, order.tolist(), [], min(k, len(pool_ND))), quality_N)


def _chosen(indices: Sequence[int], quality_N: Tensor) -> Chosen:
    return Chosen(list(indices), quality_N[list(indices)].tolist(), [None] * len(indices), None)
