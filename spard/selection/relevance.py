"""Relevance of safety examples to a task: cosines of embeddings, exact and in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spard.errors import InvalidData
from spard.selection.shards import Vectors

BLOCK = 2**21  # elements of one block: 8 MB in float32
_ROWS, _COLUMNS = 1024, 2048  # of one product
LONGEST = 1e30  # lengths up to here, and their inverses, are float32 numbers with room to spare


def quality(pool_ND: Vectors, task_MD: Vectors, beta: float = 1.0) -> Tensor:
    """Relevance of each pool row, [max_z cos(x, z)]_+^beta, in float64; without task rows nothing is relevant.

    Float32 finds the nearest task row, float64 measures its cosine.
    """
    return relevance(pool_ND, task_MD)[0].pow(beta)


def relevance(pool_ND: Vectors, task_MD: Vectors) -> tuple[Tensor, Tensor]:
    """`quality` before the power, and the task row that it is the cosine with.

    The side with more rows is read once, a block at a time; of the other a normalized copy is held in memory.
    """
    if not len(task_MD):
        inverse_N = inverse_norms(pool_ND)
        return torch.zeros_like(inverse_N), torch.zeros_like(inverse_N, dtype=torch.int64)
    if len(pool_ND) >= len(task_MD):
        return _by_pool(pool_ND, task_MD)
    return _by_task(pool_ND, task_MD)


def inverse_norms(x_ND: Vectors) -> Tensor:
    """1/|x| of each row in float64, 0 for a row of zeros."""
    norm_N = torch.empty(len(x_ND), dtype=torch.float64, device=x_ND.device)
    for rows in blocks(x_ND):
        norm_N[rows] = torch.linalg.vector_norm(x_ND[rows], dim=1, dtype=torch.float64)
    if not bool((norm_N < LONGEST).all()):
        raise InvalidData("An embedding is not finite; the base model cannot embed this text.")
    return torch.where(norm_N > 1 / LONGEST, 1 / norm_N, 0.0)


def product_dtype(x_ND: Vectors) -> torch.dtype:
    """Float32, unless the input has more or the process lets float32 products be cut short (TF32, bfloat16)."""
    whole = torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if whole and x_ND.dtype != torch.float64 else torch.float64


def blocks(x_ND: Vectors, most: int = BLOCK) -> Iterator[slice]:
    """Cut N rows into slices of at most `most` rows and `BLOCK` elements, one row at least."""
    size = max(1, min(most, BLOCK // max(1, x_ND.shape[1])))
    return (slice(start, min(start + size, len(x_ND))) for start in range(0, len(x_ND), size))


class _Nearest:
    """The task row of largest cosine for some pool rows, from columns that come one after the other."""

    def __init__(self, count: int, like: Vectors, dtype: torch.dtype) -> None:
        self._best_B = torch.full((count,), -torch.inf, dtype=dtype, device=like.device)
        self.place_B = torch.zeros(count, dtype=torch.int64, device=like.device)

    def see(self, rows: slice, x_BD: Tensor, z_DM: Tensor, start: int) -> None:
        """Look at the products of some rows with task rows from `start` on, normalized and turned."""
        value_B, place_B = (x_BD @ z_DM).max(dim=1)
        better_B = value_B > self._best_B[rows]
        self._best_B[rows] = value_B.where(better_B, self._best_B[rows])
        self.place_B[rows] = (place_B + start).where(better_B, self.place_B[rows])


def _by_pool(pool_ND: Vectors, task_MD: Vectors) -> tuple[Tensor, Tensor]:
    """Read the pool once; the task rows are held in memory."""
    dtype = product_dtype(pool_ND)
    columns = [(rows, _turned(task_MD[rows], dtype)) for rows in blocks(task_MD, _COLUMNS)]
    inverse_M = inverse_norms(task_MD)
    cosine_N = torch.empty(len(pool_ND), dtype=torch.float64, device=pool_ND.device)
    nearest_N = torch.empty(len(pool_ND), dtype=torch.int64, device=pool_ND.device)
    for rows in blocks(pool_ND, _ROWS):
        x_BD = pool_ND[rows]
        found, every = _Nearest(len(x_BD), pool_ND, dtype), slice(None)
        for at, z_DM in columns:
            found.see(every, x_BD.to(dtype), z_DM, at.start)
        z = nearest_N[rows] = found.place_B
        dot_B = (x_BD.double() * task_MD[z].double()).sum(dim=1)
        cosine_N[rows] = dot_B * inverse_norms(x_BD) * inverse_M[z]
    return cosine_N.clamp(0, 1), nearest_N


def _by_task(pool_ND: Vectors, task_MD: Vectors) -> tuple[Tensor, Tensor]:
    """Read the task rows once, and then those alone that are nearest to a pool row."""
    dtype, inverse_N = product_dtype(pool_ND), inverse_norms(pool_ND)
    found = _Nearest(len(pool_ND), pool_ND, dtype)
    for columns in blocks(task_MD, _COLUMNS):
        z_DM = _turned(task_MD[columns], dtype)
        for rows in blocks(pool_ND, _ROWS):
            found.see(rows, pool_ND[rows].to(dtype), z_DM, columns.start)
    cosine_N = torch.empty_like(inverse_N)
    for rows in blocks(pool_ND, _ROWS):
        z_BD = task_MD[found.place_B[rows]]
        dot_B = (pool_ND[rows].double() * z_BD.double()).sum(dim=1)
        cosine_N[rows] = dot_B * inverse_N[rows] * inverse_norms(z_BD)
    return cosine_N.clamp(0, 1), found.place_B


def _turned(z_MD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows normalized, as columns."""
    return (z_MD.double() * inverse_norms(z_MD).unsqueeze(1)).to(dtype).T
