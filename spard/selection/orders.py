"""The selection methods by name: each returns the order in which pool rows are taken.

A method of another package is a function of the same signature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spard.selection.neighbors import neighbor_order
from spard.selection.shards import Vectors, whole


@dataclass(frozen=True, slots=True)
class Candidates:
    """The input of a selection method.

    pool       embeddings of the N pool rows, which may lie in files; `pool_ND` loads them into memory.
    task_MD    embeddings of the M training rows.
    quality_N  the relevance of each pool row to the task.
    k          the number of pool rows to select.
    seed       the seed of the run, for methods that draw at random.
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
    """Return None: relevance and diversity has no fixed order, because the greedy DPP depends on earlier picks."""


def random_order(candidates: Candidates) -> list[int]:
    """Return a random permutation of the pool rows; it depends on the seed alone."""
    generator = torch.Generator().manual_seed(candidates.seed)
    return list(torch.randperm(len(candidates.pool), generator=generator).tolist())


def quality_order(candidates: Candidates) -> list[int]:
    """Return the pool rows by falling relevance."""
    return list(candidates.quality_N.sort(descending=True, stable=True).indices.tolist())


def nearest_first(candidates: Candidates) -> list[int]:
    """Return the pool rows with the nearest neighbors of each training row first."""
    return neighbor_order(candidates.pool_ND, candidates.task_MD, candidates.k, nearest=True)


def farthest_first(candidates: Candidates) -> list[int]:
    """Return the pool rows with the farthest neighbors of each training row first."""
    return neighbor_order(candidates.pool_ND, candidates.task_MD, candidates.k, nearest=False)
