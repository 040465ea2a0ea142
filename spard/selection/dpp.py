r"""Relevance-diversity selection: greedy MAP of a determinantal point process, without computing its kernel.

With q_i = max_z cos(x_i, z) over the task rows z, the kernel is L_ij = (q_i q_j)^beta cos(x_i, x_j) = y_i . y_j for
y_i = q_i^beta x_i / |x_i|. Adding row i to the chosen rows S gains

    det L_{S+i} / det L_S = |y_i|^2 - |V y_i|^2 = q_i^(2 beta) dist(x_i / |x_i|, span S)^2,

where V is an orthonormal basis of S. Gains only fall, so an old gain is an upper bound. Greedy selection runs in
float64 in a window of the rows with the largest bounds, as long as its best row beats every bound outside; float32
products X V_new^T then lower the bounds (`spard.selection.contenders`). Rows whose weight alone bounds them below
every pick are never read. The order is that of float64 greedy selection over the whole pool (Chen et al., 2018,
Algorithm 1).

Differences from the authors' code: no jitter on the kernel; q is clamped at 0 before the power; beyond the rank of the
pool rows follow by relevance (`Greedy.rank` is their number before that), exact copies last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spard.selection.contenders import Contenders
from spard.selection.relevance import BLOCK, quality
from spard.selection.shards import Vectors

__all__ = ["Greedy", "fill", "greedy", "quality", "select"]

TIE = 1e-12  # gains within this share of the best are equal; the lowest index wins
FRESH = 1e-2  # a window ends, and gains are computed anew, below this share of its first gain
WINDOW, WIDEST = 64, 256  # rows of a window for long embeddings, and for short ones
_LISTED = 2**16  # rows converted to a list at once
COLUMNS = 32  # rows of a window whose products with all its rows are computed together


@dataclass(frozen=True, slots=True)
class Greedy:
    """The picked rows in order, and `sweeps`, how often all bounds were lowered.

    The first `rank` rows were picked by gain, the others by relevance; `gains` has only the former, `relevance` has
    all.
    """

    indices: list[int]
    gains: list[float]  # of the first `rank` rows
    relevance: list[float]
    rank: int
    sweeps: int


def select(pool_ND: Vectors, task_MD: Tensor, k: int, beta: float = 4.0) -> list[int]:
    """Return the indices of k of the pool rows, relevant to the task rows and diverse, in the order picked."""
    return greedy(pool_ND, quality(pool_ND, task_MD), k, beta).indices


def greedy(pool_ND: Vectors, quality_N: Tensor, k: int, beta: float = 4.0, among: Tensor | None = None) -> Greedy:
    """Pick k rows by greedy MAP of L, given each pool row's relevance q before the power.

    pool_ND    embeddings of the pool; they need not be normalized.
    quality_N  relevance q of every pool row.
    among      pick only these pool rows, in rising order; None: all.

    When no row has a gain left, rows follow by relevance until there are k.
    """
    quality_N = quality_N.to(pool_ND.device, torch.float64)
    own_N = quality_N if among is None else quality_N[among]
    k = min(k, len(own_N))
    most = min(k, pool_ND.shape[1])
    rows = Contenders(pool_ND, own_N, beta, among, least=max(WIDEST, 4 * k), most=most)
    size, limit = _window_sizes(len(rows.rows_C), max(1, pool_ND.shape[1]))
    window = _Window(rows.basis_KD)
    indices, gains = list[int](), list[float]()

    while len(indices) < most and (bool((rows.bound_C > 0).any()) or rows.beyond > 0):
        best = float(rows.bound_C.max())
        # A row that was not read may gain as much: read more before any pick.
        if best * (1 - TIE) <= rows.beyond:
            rows.look_at_more(best)
            continue
        rows.tighten(size)
        places_B, rest_C = _window(rows.bound_C, size)
        residual_BD = window.move(rows, places_B)
        limits = _Limits(rest_C, rows.beyond, rows.floor(places_B), last=size >= limit)
        picks, won, gain_B = _play(residual_BD, places_B, limits, most - len(indices))
        if picks:
            indices += rows.rows_C[places_B[picks]].tolist()
            gains += won
            # After the last pick no bound is needed any more.
            if len(indices) < k:
                new_MD = _orthonormal(residual_BD[picks], rows.basis_KD)
                rows.add(new_MD)
                window.project_(new_MD)
        elif float(gain_B.max()) * (1 - TIE) <= rows.beyond:
            rows.look_at_more(float(gain_B.max()))
            continue
        else:
            # No row of the window beats every bound outside: take a larger one.
            size = min(2 * size, limit)
        rows.note_gains(places_B, gain_B)

    rank, indices = len(indices), _fill_by_relevance(pool_ND, own_N, among, indices, k)
    return Greedy(indices, [g * rows.unit for g in gains], quality_N[indices].tolist(), rank, rows.sweeps)


def _window_sizes(rows: int, columns: int) -> tuple[int, int]:
    """Return the first and the largest number of rows in a window.

    The first is half of a small pool, else smaller for longer embeddings. The window doubles whenever it is too small.
    """
    first = max(WIDEST, rows // 2) if rows <= 4 * WIDEST else min(max(WINDOW, BLOCK // 16 // columns), WIDEST)
    return first, max(first, 4 * BLOCK // columns)


def _fill_by_relevance(pool_ND: Vectors, own_N: Tensor, among: Tensor | None, chosen: list[int], k: int) -> list[int]:
    """Return `chosen` filled up to k rows in the order of relevance, exact copies last."""
    if len(chosen) == k:
        return chosen
    order_N = own_N.sort(descending=True, stable=True).indices
    order_N = order_N if among is None else among[order_N]
    parts = (order_N[start : start + _LISTED] for start in range(0, len(order_N), _LISTED))
    return fill(pool_ND, (i for part in parts for i in part.tolist()), chosen, k)


def fill(pool_ND: Vectors, order: Iterable[int], chosen: list[int], k: int) -> list[int]:
    """Return `chosen`, then rows in `order` until there are k; exact copies only if nothing else is left."""
    picked, taken = list(chosen), set(chosen)
    copies: list[int] = []
    seen = set(row_bytes(pool_ND[chosen]) if chosen else ())
    for i in order:
        if len(picked) >= k:
            break
        if i in taken:
            continue
        row = next(row_bytes(pool_ND[i : i + 1]))
        (copies if row in seen else picked).append(i)
        seen.add(row)
    return picked + copies[: k - len(picked)]


class _Window:
    """The residuals of a window's rows outside the span of the chosen rows; rows that stay are not computed again."""

    def __init__(self, basis_KD: Tensor) -> None:
        self._rows_B = torch.empty(0, dtype=torch.int64, device=basis_KD.device)
        self._residual_BD = basis_KD

    def move(self, rows: Contenders, places_B: Tensor) -> Tensor:
        """Return the residuals of the rows at these places, `[B, D]`.

        Only rows new to the window are read and projected.
        """
        rows_B, before_B = rows.rows_C[places_B], self._rows_B
        residual_BD = self._residual_BD.new_empty(len(rows_B), self._residual_BD.shape[1])
        # Both windows are in the order of the pool, so a binary search finds the rows that stay.
        at_B = torch.searchsorted(before_B, rows_B).clamp(max=max(0, len(before_B) - 1))
        stays_B = before_B[at_B] == rows_B if len(before_B) else torch.zeros_like(rows_B, dtype=torch.bool)
        residual_BD[stays_B] = self._residual_BD[at_B[stays_B]]
        residual_BD[~stays_B] = _project(rows.rows(places_B[~stays_B]), rows.basis_KD)
        self._rows_B, self._residual_BD = rows_B, residual_BD
        return residual_BD

    def project_(self, new_MD: Tensor) -> None:
        """Remove the new directions from the residuals."""
        self._residual_BD -= (self._residual_BD @ new_MD.T) @ new_MD


def _window(bound_N: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the places of the `size` largest bounds in index order, and the bounds with these places set to -1.

    Among equal bounds the lowest indices are taken.
    """
    if size >= len(bound_N):
        return torch.arange(len(bound_N), device=bound_N.device), torch.full_like(bound_N, -1.0)
    edge = bound_N.topk(size).values[-1]
    above = (bound_N > edge).nonzero().flatten()
    level = (bound_N == edge).nonzero().flatten()[: size - len(above)]
    window_B = torch.cat([above, level]).sort().values
    return window_B, bound_N.index_fill(0, window_B, -1.0)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The conditions that end the play in a window.

    rest_C   bounds of all rows that were read, in pool order; -1 for rows in the window
    beyond   upper bound on the gain of all rows that were not read
    floor_B  gains of the window's rows that rounding alone can cause
    last     the window cannot grow, so a tie with a row outside is settled inside
    """

    rest_C: Tensor
    beyond: float
    floor_B: Tensor
    last: bool


def _play(residual_BD: Tensor, window_B: Tensor, limits: _Limits, most: int) -> tuple[list[int], list[float], Tensor]:
    """Pick greedily inside a window as long as no row outside can be better.

    Returns the positions in the window, their gains, and the gains that all rows of the window have afterward.
    """
    gain_B = residual_BD.square().sum(dim=1)
    C_KB = residual_BD.new_zeros(min(most, len(gain_B)), len(gain_B))  # rows of the window's Cholesky factor
    outside = float(limits.rest_C.max())
    products: dict[int, Tensor] = {}
    picks: list[int] = []
    gains: list[float] = []
    while len(picks) < len(C_KB):
        gain_B = gain_B.where(gain_B > limits.floor_B, 0.0)
        best = float(gain_B.max())
        if best <= 0 or best * (1 + TIE) < outside or (gains and best < FRESH * gains[0]):
            break
        j = int((gain_B >= best * (1 - TIE)).nonzero()[0])
        if best * (1 - TIE) <= limits.beyond:
            break
        # The lowest index wins ties, so a tie with a row outside goes to that row if its index is lower.
        is_close = best * (1 - TIE) <= outside and not limits.last
        if is_close and _first(limits.rest_C, best * (1 - TIE)) < int(window_B[j]):
            break
        if j not in products:
            near = [j, *gain_B.topk(min(COLUMNS, len(gain_B))).indices.tolist()]
            products |= zip(near, residual_BD[near] @ residual_BD.T, strict=True)
        t = len(picks)
        C_KB[t] = (products[j] - C_KB[:t, j] @ C_KB[:t]) / gain_B[j].sqrt()
        gains.append(float(gain_B[j]))
        picks.append(j)
        # One step of the Cholesky factorization: each gain loses its squared coefficient of the pick.
        gain_B = gain_B - C_KB[t].square()
        gain_B[j] = 0.0
    return picks, gains, gain_B.where(gain_B > limits.floor_B, 0.0)


def _first(rest_N: Tensor, least: float) -> int:
    """Return the lowest index outside the window whose bound is at least `least`."""
    found = (rest_N >= least).nonzero()
    return int(found[0]) if len(found) else len(rest_N)


def _project(rows_BD: Tensor, basis_KD: Tensor) -> Tensor:
    """Return the components of the rows orthogonal to the span of the basis."""
    return rows_BD - (rows_BD @ basis_KD.T) @ basis_KD


def _orthonormal(rows_MD: Tensor, basis_KD: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows' residuals outside the span of `basis_KD`.

    Computed from Cholesky factors of the rows' Gram matrix (Yamamoto et al., 2015), twice. One pass loses accuracy if
    rows are nearly dependent; those of one window are not, because their gains are within `FRESH` of each other. The
    rows are residuals already; the projection in between removes what rounding left in the span.
    """
    Q_MD = _orthogonal(rows_MD / rows_MD.norm(dim=1, keepdim=True))
    return _orthogonal(_project(Q_MD, basis_KD))


def _orthogonal(rows_MD: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows, up to rounding, by the Cholesky factor of their Gram matrix."""
    L_MM = torch.linalg.cholesky(rows_MD @ rows_MD.T)
    Q_MD: Tensor = torch.linalg.solve_triangular(L_MM, rows_MD, upper=False)
    return Q_MD


def row_bytes(rows_BD: Tensor) -> Iterator[bytes]:
    """Yield the bytes of each row, equal for exact copies only."""
    # As uint8, because numpy has no bfloat16.
    return (row.tobytes() for row in rows_BD.contiguous().view(torch.uint8).cpu().numpy())
