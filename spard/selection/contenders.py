"""The pool rows that greedy selection can still pick, with an upper bound on the gain of each.

Gains only fall, so an old gain bounds a new one; before any product with a row was computed, its squared weight is
the bound. Rows are read in the order of their weights, and most of a large pool is never read: the rows that were not
are bounded together by the largest weight among them.

Float32 products with the directions that were chosen since a bound was computed lower that bound. Doing this for all
rows that were read is a sweep. It happens only when a row outside the front may be the next pick; until then only the
front, the rows with the largest bounds after the last sweep, is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from spard.selection.relevance import BLOCK, inverse_norms, product_dtype
from spard.selection.shards import Vectors

EVEN = 8  # matrix products are faster with a multiple of this many directions; rows of zeros fill up
FRONT = 8  # the front has one in this many of the rows that were read
SHARE = 0.5  # rows with at least this share of the best gain are read together


class Contenders:
    """The rows y_i = w_i x_i / |x_i|, w = (q / max q)^beta, read so far, and the span of the chosen rows.

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
