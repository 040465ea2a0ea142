r"""Relevance-diversity selection: greedy MAP of a determinantal point process, without its kernel.

With q_i = max_z cos(x_i, z) over the task rows z, the kernel is L_ij = (q_i q_j)^beta cos(x_i, x_j) = y_i . y_j for
y_i = q_i^beta x_i / |x_i|. Adding row i to the chosen rows S gains

    det L_{S+i} / det L_S = |y_i|^2 - |V y_i|^2 = q_i^(2 beta) dist(x_i / |x_i|, span S)^2,

V an orthonormal basis of S. Gains only fall, so an old gain is an upper bound: greedy is played in float64 inside a
window of the largest bounds for as long as its best beats every bound outside, and one float32 product X V_new^T
then lowers all bounds. The order is that of float64 greedy over the whole pool (Chen et al., 2018, Algorithm 1).

Differences from the authors' code: no jitter on the kernel; q is clamped at 0 before the power; past the rank of the
pool rows follow by relevance (`Greedy.rank` says from where on), exact copies last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from spard.selection.relevance import BLOCK, blocks, inverse_norms, product_dtype, quality

__all__ = ["Greedy", "fill", "greedy", "quality", "select"]

TIE = 1e-12  # gains within this share of the best are equal; the lowest index wins
FRESH = 1e-2  # gains that fell below this share of a window's first are computed anew
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Greedy:
    """What was picked, in order: the first `rank` rows by gain, the others by relevance."""

    indices: list[int]
    gains: list[float]  # of the first `rank` rows
    relevance: list[float]
    rank: int
    sweeps: int


def select(pool_ND: Tensor, task_MD: Tensor, k: int, beta: float = 4.0) -> list[int]:
    """Return the indices of k pool rows, relevant to the task and unlike each other, in the order picked."""
    return greedy(pool_ND, quality(pool_ND, task_MD), k, beta).indices


def greedy(pool_ND: Tensor, quality_N: Tensor, k: int, beta: float = 4.0) -> Greedy:
    """Greedy MAP of L, given the relevance q of each row before the power; filled by relevance past the rank."""
    k, quality_N = min(k, len(pool_ND)), quality_N.to(pool_ND.device, torch.float64)
    pool = _pool(pool_ND, quality_N, beta)
    basis_KD = torch.zeros(0, pool_ND.shape[1], dtype=torch.float64, device=pool_ND.device)
    bound_N = pool.weight_N.square()
    indices: list[int] = []
    gains: list[float] = []
    size = WINDOW + len(pool_ND) // 256
    limit, sweeps = max(size, 4 * BLOCK // max(1, pool_ND.shape[1])), 0

    while len(indices) < min(k, pool_ND.shape[1]) and bool((bound_N > 0).any()):
        window_B, rest_N = _window(bound_N, size)
        residual_BD = _project(pool.rows(window_B), basis_KD)
        picks, won, gain_B = _play(
            residual_BD, window_B, pool.floor(window_B), rest_N, k - len(indices), last=size >= limit
        )
        if picks:
            indices += window_B[picks].tolist()
            gains += won
            new_MD = _orthonormal(residual_BD[picks], basis_KD)
            basis_KD = torch.cat([basis_KD, new_MD])
            if len(indices) < k:
                _sweep_(bound_N, pool, new_MD)
                sweeps += 1
        else:
            size = min(2 * size, limit)
        bound_N[window_B] = gain_B  # exact

    order = torch.sort(quality_N, descending=True, stable=True).indices.tolist() if len(indices) < k else []
    rank, indices = len(indices), fill(pool_ND, order, indices, k)
    return Greedy(indices, [g * pool.unit for g in gains], quality_N[indices].tolist(), rank, sweeps)


def fill(pool_ND: Tensor, order: Iterable[int], chosen: list[int], k: int) -> list[int]:
    """`chosen`, then rows in `order` until there are k; exact copies only when nothing else is left."""
    picked, taken = list(chosen), set(chosen)
    copies: list[int] = []
    seen = {row_bytes(pool_ND[i]) for i in chosen}
    for i in order:
        if len(picked) >= k:
            break
        if i in taken:
            continue
        row = row_bytes(pool_ND[i])
        (copies if row in seen else picked).append(i)
        seen.add(row)
    return picked + copies[: k - len(picked)]


@dataclass(frozen=True, slots=True)
class _Pool:
    """The rows y_i = w_i x_i / |x_i|, w = (q / max q)^beta, kept as the embeddings, their lengths and weights."""

    x_ND: Tensor
    inverse_N: Tensor
    weight_N: Tensor
    unit: float  # what a gain of 1 is in the scale of L
    tolerance: float  # rows nearer than this to the span of the chosen, in units of their length, add nothing

    def rows(self, index: Tensor) -> Tensor:
        return self.x_ND[index].double() * (self.inverse_N[index] * self.weight_N[index]).unsqueeze(1)

    def floor(self, index: Tensor) -> Tensor:
        """Gains up to here are rounding."""
        return (self.tolerance * self.weight_N[index]).square()


def _pool(x_ND: Tensor, quality_N: Tensor, beta: float) -> _Pool:
    best = max(float(quality_N.max()), torch.finfo(torch.float64).tiny) if len(quality_N) else 1.0
    inverse_N = inverse_norms(x_ND)
    weight_N = (quality_N.clamp(min=0) / best).pow(beta) * (inverse_N > 0)
    tolerance = 2.0**-33 if x_ND.dtype == torch.float64 else 2.0**-20
    return _Pool(x_ND, inverse_N, weight_N, best ** (2 * beta), tolerance)


def _window(bound_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` rows of largest bound in index order, lowest indices first among equals, and other bounds."""
    if size >= len(bound_N):
        return torch.arange(len(bound_N), device=bound_N.device), torch.full_like(bound_N, -1.0)
    edge = bound_N.topk(size).values[-1]
    above = (bound_N > edge).nonzero().flatten()
    level = (bound_N == edge).nonzero().flatten()[: size - len(above)]
    window_B = torch.cat([above, level]).sort().values
    return window_B, bound_N.index_fill(0, window_B, -1.0)


def _play(
    residual_BD: Tensor, window_B: Tensor, floor_B: Tensor, rest_N: Tensor, limit: int, *, last: bool
) -> tuple[list[int], list[float], Tensor]:
    """Greedy inside a window while no row outside can be better: positions, gains, and what the rows still gain.

    `last`: the window cannot grow, so a tie with a row outside is settled inside.
    """
    gain_B = residual_BD.square().sum(dim=1)
    C_KB = residual_BD.new_zeros(min(limit, len(gain_B)), len(gain_B))  # rows of the window's Cholesky factor
    outside = float(rest_N.max())
    picks: list[int] = []
    gains: list[float] = []
    while len(picks) < len(C_KB):
        gain_B = gain_B.where(gain_B > floor_B, 0.0)
        best = float(gain_B.max())
        if best <= 0 or best * (1 + TIE) < outside or (gains and best < FRESH * gains[0]):
            break
        j = int((gain_B >= best * (1 - TIE)).nonzero()[0])
        if best * (1 - TIE) <= outside and not last and _first(rest_N, best * (1 - TIE)) < int(window_B[j]):
            break
        t = len(picks)
        C_KB[t] = (residual_BD @ residual_BD[j] - C_KB[:t, j] @ C_KB[:t]) / gain_B[j].sqrt()
        gains.append(float(gain_B[j]))
        picks.append(j)
        gain_B = gain_B - C_KB[t].square()
        gain_B[j] = 0.0
    return picks, gains, gain_B.where(gain_B > floor_B, 0.0)


def _first(rest_N: Tensor, least: float) -> int:
    """Return the lowest index outside the window whose bound is at least `least`."""
    found = (rest_N >= least).nonzero()
    return int(found[0]) if len(found) else len(rest_N)


def _project(rows_BD: Tensor, basis_KD: Tensor) -> Tensor:
    """Return what is left of the rows outside the span of the basis."""
    return rows_BD - (rows_BD @ basis_KD.T) @ basis_KD


def _orthonormal(rows_MD: Tensor, basis_KD: Tensor) -> Tensor:
    """Return an orthonormal basis of what the rows add to the span of the basis; projecting twice is enough."""
    rows_MD = _project(rows_MD / rows_MD.norm(dim=1, keepdim=True), basis_KD)
    return _project(torch.linalg.qr(rows_MD.T).Q.T, basis_KD)


def _sweep_(bound_N: Tensor, pool: _Pool, new_MD: Tensor) -> None:
    """Lower each bound by the part of its row in the new directions, less what rounding may have added to it."""
    dtype = product_dtype(pool.x_ND)
    eps, (m, d) = torch.finfo(dtype).eps, new_MD.shape
    V_MD = new_MD.to(dtype)
    for rows in blocks(pool.x_ND):
        c_MB = V_MD @ pool.x_ND[rows].to(dtype).T
        share_B = c_MB.mul_(pool.inverse_N[rows].to(dtype)).square_().sum(dim=0).double()
        error_B = 2 * eps * (m * d * share_B).sqrt() + m * d * eps**2
        bound_N[rows] -= pool.weight_N[rows].square() * (share_B - error_B).clamp(min=0)
    bound_N.clamp_(min=0)


def row_bytes(row_D: Tensor) -> bytes:
    """Equal for exact copies only."""
    return row_D.contiguous().view(torch.uint8).cpu().numpy().tobytes()
