"""The orders in which selection methods take pool rows; a method of another package is a function like these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spard.selection.neighbors import neighbor_order
from spard.selection.shards import Vectors, whole


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a selection method sees.

    pool       embeddings of the N pool rows, which may lie in files; `pool_ND` has them in memory.
    task_MD    embeddings of the M training rows.
    quality_N  the relevance of each pool row to the task.
    k          how many pool rows are wanted.
    seed       of the run, for methods that draw.
    """

    pool: Vectors
    task_MD: Tensor
    quality_N: Tensor
    k: int
    seed: int

    @property
    def pool_ND(self) -> Tensor:  # noqa: N802 - as tensors are named
        """The embeddings of the pool as one tensor."""
        return whole(self.pool)


def no_order(candidates: Candidates) -> None:
    """Relevance and diversity: each choice depends on those before, so the greedy DPP takes the rows itself."""


def random_order(candidates: Candidates) -> list[int]:
    """Return a permutation that depends only on the seed."""
    generator = torch.Generator().manual_seed(candidates.seed)
    return list(torch.randperm(len(candidates.pool), generator=generator).tolist())


def quality_order(candidates: Candidates) -> list[int]:
    """Return the most relevant rows first."""
    return list(candidates.quality_N.sort(descending=True, stable=True).indices.tolist())


def nearest_first(candidates: Candidates) -> list[int]:
    """Return the nearest neighbors of each training row first."""
    return neighbor_order(candidates.pool_ND, candidates.task_MD, candidates.k, nearest=True)


def farthest_first(candidates: Candidates) -> list[int]:
    """Return the farthest pool rows of each training row first."""
    return neighbor_order(candidates.pool_ND, candidates.task_MD, candidates.k, nearest=False)
