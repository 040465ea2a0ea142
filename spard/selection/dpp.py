"""Relevance-diversity selection: greedy MAP of a determinantal point process, without computing its kernel.

With q_i = max_z cos(x_i, z) over the task rows z, the kernel is L_ij = (q_i q_j)^beta cos(x_i, x_j) = y_i . y_j for
y_i = q_i^beta x_i / |x_i|. Adding row i to the chosen rows S gains

    det L_{S+i} / det L_S = |y_i|^2 - |V y_i|^2 = q_i^(2 beta) dist(x_i / |x_i|, span S)^2,

where V is an orthonormal basis of S. Gains only fall, so an old gain is an upper bound. Greedy selection runs in
float64 in a window of the rows with the largest bounds, as long as its best row beats every bound outside; float32
products X V_new^T then lower the bounds (`Contenders`). Rows whose weight alone bounds them below every pick are never
read. The order is that of float64 greedy selection over the whole pool (Chen et al., 2018, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spard.models.budget import Tell
from spard.selection.relevance import BLOCK, inverse_norms, product_dtype, quality
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


def greedy(
    pool_ND: Vectors,
    quality_N: Tensor,
    k: int,
    beta: float = 4.0,
    among: Tensor | None = None,
    tell: Tell | None = None,
) -> Greedy:
    """Pick k rows by greedy MAP of L, given each pool row's relevance q before the power.

    pool_ND    embeddings of the pool; they need not be normalized.
    quality_N  relevance q of every pool row.
    among      pick only these pool rows, in rising order; None: all.
    tell       gets the rows picked so far and `k`, after each window.

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
        if tell:
            tell(len(indices), k)
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
    """The conditions that end the greedy picks in a window.

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


EVEN = 8  # matrix products are faster with a multiple of this many directions; rows of zeros fill up
FRONT = 8  # the front has one in this many of the rows that were read
SHARE = 0.5  # rows with at least this share of the best gain are read together


class Contenders:
    """The pool rows that greedy selection can still pick: y_i = w_i x_i / |x_i|, w = (q / max q)^beta.

    Before any product with a row was computed, its squared weight bounds its gain. Rows are read in the order of their
    weights, and most of a large pool is never read: the rows that were not are bounded together by the largest weight
    among them.

    Float32 products with the directions that were chosen since a bound was computed lower that bound. Doing this for
    all rows that were read is a sweep. It happens only when a row outside the front may be the next pick; until then
    only the front, the rows with the largest bounds after the last sweep, is updated.

    Places index the rows read so far, in pool order; `rows_C` maps a place to its pool row.

    unit       a gain of 1 here, in the scale of the kernel L
    basis_KD   orthonormal basis of the chosen rows, float64
    bound_C    upper bound on the gain of each row
    """

    def __init__(
        self, pool: Vectors, quality_N: Tensor, beta: float, among: Tensor | None, *, least: int, most: int
    ) -> None:
        """Read the rows of the largest weights, at least `least` of them.

        `quality_N` is the relevance of the rows named by `among`, or of all pool rows if that is None. At most `most`
        directions can be added.
        """
        best = max(float(quality_N.max()), torch.finfo(torch.float64).tiny) if len(quality_N) else 1.0
        self.pool, self.among = pool, among
        self.unit = best ** (2 * beta)
        self.tolerance = 2.0**-33 if pool.dtype == torch.float64 else 2.0**-20  # relative residual that is rounding
        self._weight_N = (quality_N.clamp(min=0) / best).pow(beta)
        self._falling_N, self._order_N = self._weight_N.square().sort(descending=True, stable=True)
        nothing = self._weight_N.new_empty(0)
        self._index_C = self.rows_C = self._known_C = self._order_N[:0]  # known: directions that a bound includes
        self.weight_C, self._inverse_C, self.bound_C = nothing, nothing, nothing
        self._is_front_C = nothing.bool()
        # Room for all directions from the start, so that adding some copies nothing.
        self._room_KD = self._weight_N.new_empty(most, pool.shape[1])
        self._rough_KD = self._weight_N.new_empty(most + EVEN, pool.shape[1], dtype=product_dtype(pool))
        self.basis_KD = self._room_KD[:0]
        self.sweeps = 0
        self._extend_window(max(least, self._heavier(SHARE)))

    @property
    def beyond(self) -> float:
        """An upper bound on the gain of every row that was not read yet; -1 if all rows were read."""
        count = len(self.rows_C)
        return float(self._falling_N[count]) if count < len(self._falling_N) else -1.0

    def look_at_more(self, best: float) -> None:
        """Read twice as many rows, and all whose squared weight is at least half of `best`."""
        self._extend_window(max(2 * len(self.rows_C), self._heavier(SHARE * best)))

    def rows(self, places: Tensor) -> Tensor:
        """Return y of the rows at these places, `[B, D]`, in float64."""
        scale_B = self._inverse_C[places] * self.weight_C[places]
        return self.pool[self.rows_C[places]].double() * scale_B.unsqueeze(1)

    def floor(self, places: Tensor) -> Tensor:
        """Return the largest gain of each row at these places that rounding errors alone can cause."""
        return (self.tolerance * self.weight_C[places]).square()

    def add(self, new_MD: Tensor) -> None:
        """Add orthonormal directions `[M, D]` to the basis."""
        before, count = len(self.basis_KD), len(self.basis_KD) + len(new_MD)
        self._room_KD[before:count] = self._rough_KD[before:count] = new_MD
        # Rows of zeros pad the float32 copy, so that `_share` can multiply by a multiple of EVEN directions.
        self._rough_KD[count : count + EVEN] = 0
        self.basis_KD = self._room_KD[:count]

    def note_gains(self, places: Tensor, gain_B: Tensor) -> None:
        """Store exact gains, computed with all directions of the basis, as the bounds of these places."""
        self.bound_C[places], self._known_C[places] = gain_B, len(self.basis_KD)

    def tighten(self, size: int) -> None:
        """Lower the bounds until the `size` largest take all directions of the basis into account."""
        while True:
            largest_B = self.bound_C.topk(min(size, len(self.bound_C))).indices
            if bool((self._known_C[largest_B] == len(self.basis_KD)).all()):
                return
            if bool(self._is_front_C[largest_B].all()):
                self._lower(self._pieces(self._is_front_C))
            else:
                self._sweep(size)

    def _sweep(self, size: int) -> None:
        """Lower the bounds of all rows that were read, and make those with the largest bounds the front."""
        self._lower(self._pieces(torch.ones_like(self._is_front_C)))
        front = min(max(2 * size, len(self.bound_C) // FRONT), len(self.bound_C))
        self._is_front_C = torch.zeros_like(self._is_front_C).index_fill(0, self.bound_C.topk(front).indices, 1)
        self.sweeps += 1

    def _lower(self, pieces: Iterable[slice | Tensor]) -> None:
        """Lower the bounds of some rows by their share in the directions added since each bound was computed."""
        for part in pieces:
            known_B = self._known_C[part]
            first = int(known_B.min())
            if first < len(self.basis_KD):
                share_B = self._share(self._read(part), self._inverse_C[part], known_B, first)
                self.bound_C[part] = (self.bound_C[part] - self.weight_C[part].square() * share_B).clamp(min=0)
                self._known_C[part] = len(self.basis_KD)

    def _extend_window(self, count: int) -> None:
        """Read the `count` rows of the largest weights; bounds of the new rows take all directions into account."""
        before_B, self._index_C = self._index_C, self._order_N[:count].sort().values
        self.rows_C = self._index_C if self.among is None else self.among[self._index_C]
        # Rows read before keep their norms, bounds and known directions; both index lists are sorted.
        known_B = torch.searchsorted(self._index_C, before_B)
        is_new_C = torch.ones_like(self._index_C, dtype=torch.bool).index_fill(0, known_B, 0)
        inverse_C = self._inverse_C.new_empty(len(self._index_C)).index_copy(0, known_B, self._inverse_C)
        for part in self._pieces(is_new_C):
            inverse_C[part] = inverse_norms(self._read(part))
        self._inverse_C, self.weight_C = inverse_C, self._weight_N[self._index_C] * (inverse_C > 0)
        self.bound_C = self.weight_C.square().index_copy(0, known_B, self.bound_C)
        self._known_C = torch.zeros_like(self._index_C).index_copy(0, known_B, self._known_C)
        self._is_front_C = torch.zeros_like(is_new_C).index_copy(0, known_B, self._is_front_C)
        self._lower(self._pieces(is_new_C))

    def _heavier(self, least: float) -> int:
        """Return the number of rows whose squared weight is at least `least`."""
        return int((self._falling_N >= least).sum())

    def _share(self, x_BD: Tensor, inverse_B: Tensor, known_B: Tensor, first: int) -> Tensor:
        """Return a lower bound on each row's squared share in the directions that its bound does not take into account.

        Row i takes the first `known_B[i]` directions into account, and every row those before `first`. The rounding
        error that float32 products can have is subtracted, so the bound on the gain stays an upper bound.
        """
        count, eps = len(self.basis_KD), torch.finfo(self._rough_KD.dtype).eps
        m, d = count - first, self.pool.shape[1]
        end = count if m < EVEN else count + -m % EVEN
        c_BM = x_BD.to(self._rough_KD.dtype) @ self._rough_KD[first:end].T
        if bool((known_B > first).any()):
            place_M = torch.arange(first, end, device=known_B.device)
            c_BM.masked_fill_(place_M < known_B.unsqueeze(1), 0.0)
        share_B = (torch.linalg.vector_norm(c_BM, dim=1).double() * inverse_B).square()
        error_B = 2 * eps * (m * d * share_B).sqrt() + m * d * eps**2
        sure_B: Tensor = (share_B - error_B).clamp(min=0)
        return sure_B

    def _read(self, part: slice | Tensor) -> Tensor:
        """Return rows as they are in the pool; a slice of a pool that was read as a whole is not copied."""
        rows = part if len(self.rows_C) == len(self.pool) else self.rows_C[part]
        if isinstance(rows, Tensor) and isinstance(self.pool, Tensor):
            return self.pool.index_select(0, rows)  # twice as fast as indexing
        return self.pool[rows]

    def _pieces(self, is_meant_C: Tensor) -> Iterator[slice | Tensor]:
        """Yield the indices of the True entries, one block at a time; as slices if all entries are True."""
        step = max(1, BLOCK // max(1, self.pool.shape[1]))
        if bool(is_meant_C.all()):
            return (slice(start, start + step) for start in range(0, len(is_meant_C), step))
        places = is_meant_C.nonzero().flatten()
        return (places[start : start + step] for start in range(0, len(places), step))
