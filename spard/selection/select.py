"""Select the safe set: the rows of the safety pool that a run trains on.

A selection method returns the order in which pool rows are taken. A method of another package is a function of the same
signature as `random_order`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spard.config import Selection
from spard.config.extensions import SELECTIONS
from spard.models.budget import Tell
from spard.selection import dpp
from spard.selection.relevance import blocks, inverse_norms, product_dtype, relevance
from spard.selection.shards import Vectors, whole

_GREEDY = "relevance_diversity"


@dataclass(frozen=True, slots=True)
class PoolSelection:
    """Pool rows in the order selected, with the relevance of each.

    For the DPP also the gains of the first `rank` rows.
    """

    indices: list[int]
    relevance: list[float]
    gains: list[float | None]
    rank: int | None  # None: the method knows no rank


def choose(
    pool_ND: Vectors,
    task_MD: Tensor,
    k: int,
    selection: Selection,
    seed: int,
    among: Sequence[int] | None = None,
    near: tuple[Tensor, Tensor] | None = None,
    tell: Tell | None = None,
) -> PoolSelection:
    """Select k pool rows for a task; exact copies only if the distinct rows run out.

    pool_ND    embeddings of the pool; may lie in files, but selection by neighbors loads them into memory.
    task_MD    embeddings of the training rows.
    selection  method, beta, `reserve` (share chosen by diversity alone) and `influence_cap` (share per customer row).
    seed       used by `random`, and by methods of other packages.
    among      select from these rows only, in rising order; None: all.
    near       relevance and nearest task row of each pool row, if already known (`spard.selection.relevance`).
    tell       gets the rows selected and wanted; begun anew if the rows are selected in several parts.
    """
    if among is not None and len(among) < len(pool_ND) and selection.method != _GREEDY:
        return _of_part(pool_ND, task_MD, k, selection, seed, among, near, tell)
    every = range(len(pool_ND)) if among is None else among
    k = min(k, len(every))
    quality_N, nearest_N = near or relevance(pool_ND, task_MD)
    order = SELECTIONS.load(selection.method)(Candidates(pool_ND, task_MD, quality_N, k, seed))

    def pick(rows: Sequence[int], n: int) -> PoolSelection:
        return _pick(pool_ND, quality_N, rows, n, selection.beta, order, tell)

    # With a reserve, some rows are selected by diversity alone, so that a customer's decoy rows cannot steer all of
    # them.
    if not selection.reserve and selection.influence_cap == 1:
        return pick(every, k)

    reserved = _diverse(pool_ND, every, round(selection.reserve * k), tell)
    most = max(1, int(selection.influence_cap * k))
    steered = _choose_few(pick, _rest(pool_ND, every, reserved), k - len(reserved), nearest_N.tolist(), most)
    taken = [*steered.indices, *reserved]
    # Rows that the cap refused are replaced by diverse ones, which no customer row can choose.
    taken += _diverse(pool_ND, _rest(pool_ND, every, taken), k - len(taken), tell)
    rest = dpp.fill(pool_ND, every, taken, k)[len(steered.indices) :]
    return PoolSelection(
        [*steered.indices, *rest],
        [*steered.relevance, *quality_N[rest].tolist()],
        [*steered.gains, *[None] * len(rest)],
        steered.rank,
    )


def _of_part(
    pool_ND: Vectors,
    task_MD: Tensor,
    k: int,
    selection: Selection,
    seed: int,
    among: Sequence[int],
    near: tuple[Tensor, Tensor] | None,
    tell: Tell | None,
) -> PoolSelection:
    """Select from some rows as if they were the whole pool; the returned indices refer to the whole pool."""
    index_N = torch.tensor(among, dtype=torch.int64)
    own = near and (near[0][index_N], near[1][index_N])
    part = choose(pool_ND[index_N], task_MD, k, selection, seed, None, own, tell)
    return replace(part, indices=[among[i] for i in part.indices])


def _pick(
    pool_ND: Vectors,
    quality_N: Tensor,
    rows: Sequence[int],
    k: int,
    beta: float,
    order: Sequence[int] | None,
    tell: Tell | None,
) -> PoolSelection:
    """Select k of the pool rows `rows`: by the DPP if `order` is None, else the first k in that order."""
    if order is None:
        picked = dpp.greedy(pool_ND, quality_N, k, beta, _row_index(pool_ND, rows), tell)
        gains = [*picked.gains, *[None] * (len(picked.indices) - picked.rank)]
        return PoolSelection(picked.indices, picked.relevance, gains, picked.rank)
    allowed = set(rows)
    indices = dpp.fill(pool_ND, (i for i in order if i in allowed), [], min(k, len(rows)))
    return PoolSelection(indices, quality_N[indices].tolist(), [None] * len(indices), None)


def _row_index(pool_ND: Vectors, rows: Sequence[int]) -> Tensor | None:
    """Return rows as a tensor, or None if they are the whole pool."""
    return torch.tensor(rows, dtype=torch.int64, device=pool_ND.device) if len(rows) < len(pool_ND) else None


def _choose_few(
    pick: Callable[[Sequence[int], int], PoolSelection], rows: Sequence[int], k: int, nearest: Sequence[int], most: int
) -> PoolSelection:
    """Select at most k rows, of which at most `most` have the same nearest customer row.

    When a row exceeds the cap, it is removed with all later rows of the same customer row, and the method runs again.
    The picks before it do not change then, so the result is that of the method with the cap applied to every pick.
    """
    while True:
        chosen = pick(rows, k)
        count: Counter[int] = Counter()
        for place, row in enumerate(chosen.indices):
            count[nearest[row]] += 1
            if count[nearest[row]] > most:
                kept = set(chosen.indices[:place])
                rows = [i for i in rows if i in kept or nearest[i] != nearest[row]]
                break
        else:
            return chosen


def _diverse(pool_ND: Vectors, rows: Sequence[int], k: int, tell: Tell | None = None) -> list[int]:
    """Select k rows that differ from each other, independent of the customer's rows."""
    if k <= 0 or not rows:
        return []
    alike_N = torch.ones(len(pool_ND), dtype=torch.float64)
    return dpp.greedy(pool_ND, alike_N, k, 0.0, _row_index(pool_ND, rows), tell).indices


def _rest(pool_ND: Vectors, rows: Sequence[int], taken: Sequence[int]) -> list[int]:
    """Return the rows that are neither taken nor exact copies of a taken row."""
    if not taken:
        return list(rows)
    seen = set(dpp.row_bytes(pool_ND[taken]))
    index_N = torch.tensor(rows, dtype=torch.int64)
    parts = (index_N[part] for part in blocks(torch.empty(len(rows), pool_ND.shape[1], device="meta")))
    named = ((i, row) for part in parts for i, row in zip(part.tolist(), dpp.row_bytes(pool_ND[part]), strict=True))
    return [i for i, row in named if row not in seen]


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
