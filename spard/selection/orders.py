"""The selection methods by name: each returns the order in which pool rows are taken.

A method of another package is a function of the same signature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spard.selection.relevance import blocks, inverse_norms, product_dtype
from spard.selection.shards import Vectors, whole

# Selection by nearest or farthest neighbors of each task row (Hsiung et al., 2025).
#
# For every task row take the K pool rows of highest (or lowest) cosine, where K is the smallest number for which
# their union has at least k rows; the k rows of the union with the best score are selected. The authors embed whole
# examples by the state of their last token; this uses the same embeddings as the other selection methods here.


def neighbor_order(pool_ND: Tensor, task_MD: Tensor, k: int, *, nearest: bool) -> list[int]:
    """Return the pool rows in the order of selection: by score within the union of neighbors, then the other rows.

    The union has the first neighbors of each task row, enough of them for at least `k` rows in all. The other rows are
    sorted by their best rank among the neighbors of any task row.
    """
    score_N, rank_N = _best(pool_ND, task_MD, max(1, min(k, len(pool_ND))), sign=1.0 if nearest else -1.0)
    K = rank_N.sort().values[min(k, len(pool_ND)) - 1] if k else rank_N.new_zeros(())
    by_score = score_N.sort(descending=True, stable=True).indices
    outside = (rank_N[by_score] - K).clamp(min=0)  # 0 for rows of the union
    order: list[int] = by_score[outside.sort(stable=True).indices].tolist()
    return order


def _best(pool_ND: Tensor, task_MD: Tensor, most: int, sign: float) -> tuple[Tensor, Tensor]:
    """Return each pool row's best signed cosine, and its best rank among the first `most` neighbors of any task row."""
    inverse_N, inverse_M, dtype = inverse_norms(pool_ND), inverse_norms(task_MD), product_dtype(pool_ND)
    unit_ND = (pool_ND.double() * inverse_N.unsqueeze(1)).to(dtype)
    score_N = torch.full((len(pool_ND),), -torch.inf, dtype=dtype, device=pool_ND.device)
    rank_N = torch.full((len(pool_ND),), most, dtype=torch.int64, device=pool_ND.device)
    place_K = torch.arange(most, device=pool_ND.device)
    # A tensor on "meta" has a shape but no memory: it only sizes the blocks of the [M, N] cosines.
    for rows in blocks(pool_ND.new_empty(len(task_MD), len(pool_ND), device="meta")):
        z_BD = (task_MD[rows].double() * inverse_M[rows].unsqueeze(1) * sign).to(dtype)
        cosine_BN = z_BD @ unit_ND.T
        score_N = torch.maximum(score_N, cosine_BN.amax(dim=0))
        first_BK = cosine_BN.topk(most, dim=1).indices
        rank_N.scatter_reduce_(0, first_BK.flatten(), place_K.repeat(len(z_BD)), "amin")
    return score_N, rank_N


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
