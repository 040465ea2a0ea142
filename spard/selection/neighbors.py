"""Selection by nearest or farthest neighbors of each task row (Hsiung et al., 2025).

For every task row take the K pool rows of highest (or lowest) cosine; K is the smallest number for which the union of
these has k rows, and of the union those of best score are kept. Unlike the authors, who embed whole examples by the
state of their last token, this uses the embeddings of all selection methods here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spard.selection.relevance import blocks, inverse_norms, product_dtype


def neighbor_order(pool_ND: Tensor, task_MD: Tensor, k: int, *, nearest: bool) -> list[int]:
    """Pool rows in the order taken: the union's by score, then the others by how near any task row they are."""
    score_N, rank_N = _best(pool_ND, task_MD, max(1, min(k, len(pool_ND))), sign=1.0 if nearest else -1.0)
    K = rank_N.sort().values[min(k, len(pool_ND)) - 1] if k else rank_N.new_zeros(())
    by_score = score_N.sort(descending=True, stable=True).indices
    outside = (rank_N[by_score] - K).clamp(min=0)  # 0 for rows of the union
    order: list[int] = by_score[outside.sort(stable=True).indices].tolist()
    return order


def _best(pool_ND: Tensor, task_MD: Tensor, most: int, sign: float) -> tuple[Tensor, Tensor]:
    """Return the best signed cosine of each pool row, and its best place among the first `most` of any task row."""
    inverse_N, inverse_M, dtype = inverse_norms(pool_ND), inverse_norms(task_MD), product_dtype(pool_ND)
    unit_ND = (pool_ND.double() * inverse_N.unsqueeze(1)).to(dtype)
    score_N = torch.full((len(pool_ND),), -torch.inf, dtype=dtype, device=pool_ND.device)
    rank_N = torch.full((len(pool_ND),), most, dtype=torch.int64, device=pool_ND.device)
    place_K = torch.arange(most, device=pool_ND.device)
    for rows in blocks(pool_ND.new_empty(len(task_MD), len(pool_ND), device="meta")):
        z_BD = (task_MD[rows].double() * inverse_M[rows].unsqueeze(1) * sign).to(dtype)
        cosine_BN = z_BD @ unit_ND.T
        score_N = torch.maximum(score_N, cosine_BN.amax(dim=0))
        first_BK = cosine_BN.topk(most, dim=1).indices
        rank_N.scatter_reduce_(0, first_BK.flatten(), place_K.repeat(len(z_BD)), "amin")
    return score_N, rank_N
