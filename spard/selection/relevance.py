"""Relevance of safety examples to a task: cosines of embeddings, exact and in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spard.errors import InvalidData

BLOCK = 2**21  # elements of one block: 8 MB in float32
LONGEST = 1e30  # lengths up to here, and their inverses, are float32 numbers with room to spare


def quality(pool_ND: Tensor, task_MD: Tensor, beta: float = 1.0) -> Tensor:
    """Relevance of each pool row, [max_z cos(x, z)]_+^beta, in float64; without task rows nothing is relevant.

    Float32 finds the nearest task row, float64 measures its cosine.
    """
    return relevance(pool_ND, task_MD)[0].pow(beta)


def relevance(pool_ND: Tensor, task_MD: Tensor) -> tuple[Tensor, Tensor]:
    """`quality` before the power, and the task row that it is the cosine with."""
    inverse_N, inverse_M = inverse_norms(pool_ND), inverse_norms(task_MD)
    if not len(task_MD):
        return torch.zeros_like(inverse_N), torch.zeros_like(inverse_N, dtype=torch.int64)
    nearest_N = _nearest(pool_ND, task_MD, inverse_M)
    cosine_N = torch.empty_like(inverse_N)
    for rows in blocks(pool_ND):
        z = nearest_N[rows]
        dot = (pool_ND[rows].double() * task_MD[z].double()).sum(dim=1)
        cosine_N[rows] = dot * inverse_N[rows] * inverse_M[z]
    return cosine_N.clamp(0, 1), nearest_N


def inverse_norms(x_ND: Tensor) -> Tensor:
    """1/|x| of each row in float64, 0 for a row of zeros."""
    norm_N = torch.empty(len(x_ND), dtype=torch.float64, device=x_ND.device)
    for rows in blocks(x_ND):
        norm_N[rows] = torch.linalg.vector_norm(x_ND[rows], dim=1, dtype=torch.float64)
    if not bool((norm_N < LONGEST).all()):
        raise InvalidData("An embedding is not finite; the base model cannot embed this text.")
    return torch.where(norm_N > 1 / LONGEST, 1 / norm_N, 0.0)


def product_dtype(x_ND: Tensor) -> torch.dtype:
    """Float32, unless the input has more or the process lets float32 products be cut short (TF32, bfloat16)."""
    whole = torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if whole and x_ND.dtype != torch.float64 else torch.float64


def blocks(x_ND: Tensor, most: int = BLOCK) -> Iterator[slice]:
    """Cut N rows into slices of at most `most` rows and `BLOCK` elements, one row at least."""
    size = max(1, min(most, BLOCK // max(1, x_ND.shape[1])))
    return (slice(start, min(start + size, len(x_ND))) for start in range(0, len(x_ND), size))


def _nearest(pool_ND: Tensor, task_MD: Tensor, inverse_M: Tensor) -> Tensor:
    """Return the task row of largest cosine for each pool row, computed by blocks with a running maximum."""
    dtype = product_dtype(pool_ND)
    best_N = torch.full((len(pool_ND),), -torch.inf, dtype=dtype, device=pool_ND.device)
    nearest_N = torch.zeros(len(pool_ND), dtype=torch.int64, device=pool_ND.device)
    for columns in blocks(task_MD, 2048):
        z_DM = (task_MD[columns].double() * inverse_M[columns].unsqueeze(1)).to(dtype).T
        for rows in blocks(pool_ND, 1024):
            value_B, place_B = (pool_ND[rows].to(dtype) @ z_DM).max(dim=1)
            better_B = value_B > best_N[rows]
            best_N[rows] = value_B.where(better_B, best_N[rows])
            nearest_N[rows] = (place_B + columns.start).where(better_B, nearest_N[rows])
    return nearest_N
