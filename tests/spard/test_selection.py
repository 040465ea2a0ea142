from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from spard.config import Selection
from spard.config.extensions import SELECTIONS
from spard.selection import dpp
from spard.selection.relevance import relevance
from spard.selection.select import choose

METHODS = SELECTIONS.names()


def normal(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


POOL, TASK = normal(200, 16, 0), normal(20, 16, 1)
QUALITY = dpp.quality(POOL, TASK)


def test_relevance_diversity_is_the_greedy_dpp() -> None:
    chosen = choose(POOL, TASK, 9, Selection(beta=2), seed=0)

    assert chosen.indices == dpp.select(POOL, TASK, 9, beta=2)


def test_max_quality_takes_the_most_relevant_rows() -> None:
    chosen = choose(POOL, TASK, 9, Selection(method="max_quality"), seed=0)

    assert chosen.indices == QUALITY.argsort(descending=True)[:9].tolist()


def neighbors(k: int, sign: float) -> list[int]:
    """The definition: the smallest K whose union of K best rows for each task row has k rows, cut by score."""
    cosine_NM = sign * normalize(POOL.double(), dim=1) @ normalize(TASK.double(), dim=1).T
    order_NM = cosine_NM.argsort(dim=0, descending=True)
    union: set[int] = set()
    for row in range(len(POOL)):
        if len(union) >= k:
            break
        union |= set(order_NM[row].tolist())
    return sorted(union, key=lambda i: -float(cosine_NM[i].max()))[:k]


@pytest.mark.parametrize("k", [1, 9, 60, 200])
@pytest.mark.parametrize(("method", "sign"), [("high_similarity", 1.0), ("low_similarity", -1.0)])
def test_similarity_takes_neighbors_of_every_task_row(method: str, sign: float, k: int) -> None:
    assert choose(POOL, TASK, k, Selection(method=method), seed=0).indices == neighbors(k, sign)


def test_high_similarity_is_not_max_quality() -> None:
    high, best = (choose(POOL, TASK, 30, Selection(method=each), 0) for each in ("high_similarity", "max_quality"))
    assert set(high.indices) != set(best.indices)


def test_random_rows_follow_the_seed() -> None:
    first, again, other = (choose(POOL, TASK, 9, Selection(method="random"), seed).indices for seed in (1, 1, 2))

    assert first == again != other


def test_random_rows_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()

    choose(POOL, TASK, 9, Selection(method="random"), seed=1)

    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("method", METHODS)
def test_copies_wait_until_distinct_rows_run_out(method: str) -> None:
    pool_ND = POOL[:8].repeat(3, 1)

    chosen = choose(pool_ND, TASK, 10, Selection(method=method), seed=0)

    assert len({i % 8 for i in chosen.indices[:8]}) == 8
    assert len(set(chosen.indices)) == 10


@pytest.mark.parametrize("method", METHODS)
def test_every_choice_has_a_relevance_and_a_gain_or_none(method: str) -> None:
    chosen = choose(POOL, TASK, 20, Selection(method=method), seed=0)

    assert chosen.relevance == QUALITY[chosen.indices].tolist()
    assert len(chosen.gains) == 20


def test_past_the_rank_there_is_no_gain() -> None:
    chosen = choose(POOL, TASK, 20, Selection(), seed=0)

    assert chosen.rank == 16
    assert chosen.gains[16:] == [None] * 4


@pytest.mark.parametrize("method", METHODS)
def test_more_rows_than_the_pool_has_give_the_pool(method: str) -> None:
    assert sorted(choose(POOL, TASK, 999, Selection(method=method), seed=0).indices) == list(range(200))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{"reserve": 0.3}, {"influence_cap": 0.1}, {"reserve": 0.3, "influence_cap": 0.1}])
@pytest.mark.parametrize("k", [1, 30, 200, 999])
def test_the_options_choose_as_many_rows_each_once(method: str, options: dict[str, Any], k: int) -> None:
    chosen = choose(POOL, TASK, k, replace(Selection(method=method), **options), seed=0)

    assert len(set(chosen.indices)) == len(chosen.indices) == min(k, 200)
    assert len(chosen.gains) == len(chosen.relevance) == len(chosen.indices)
    assert chosen.relevance == QUALITY[chosen.indices].tolist()


def test_the_reserve_does_not_depend_on_the_customers_rows() -> None:
    selection = Selection(reserve=0.3)
    one, two = (set(choose(POOL, task, 40, selection, seed=0).indices) for task in (TASK, normal(20, 16, 7)))

    reserved = set(dpp.greedy(POOL, torch.ones(200, dtype=torch.float64), 12, 0.0).indices)

    assert reserved <= one
    assert reserved <= two
    assert one != two


def test_a_reserve_of_all_is_diversity_alone() -> None:
    chosen = choose(POOL, TASK, 10, Selection(reserve=1.0), seed=0)
    assert chosen.indices == dpp.greedy(POOL, torch.ones(200, dtype=torch.float64), 10, 0.0).indices


@pytest.mark.parametrize("method", METHODS)
def test_no_customer_row_draws_more_than_the_cap(method: str) -> None:
    nearest = relevance(POOL, TASK)[1].tolist()

    chosen = choose(POOL, TASK, 20, Selection(method=method, influence_cap=0.1), seed=0)

    assert max(Counter(nearest[i] for i in chosen.indices).values()) <= 2


def test_the_cap_is_greedy_with_the_cap_in_every_choice() -> None:
    nearest, k, most = relevance(POOL, TASK)[1].tolist(), 12, 1
    y_ND = normalize(POOL.double(), dim=1) * QUALITY.pow(2).unsqueeze(1)
    expected: list[int] = []
    for _ in range(k):
        full = {row for row, n in Counter(nearest[i] for i in expected).items() if n >= most}
        best = max(
            (i for i in range(200) if i not in expected and nearest[i] not in full),
            key=lambda i: float(torch.linalg.slogdet(y_ND[[*expected, i]] @ y_ND[[*expected, i]].T)[1]),
        )
        expected.append(best)

    chosen = choose(POOL, TASK, k, Selection(beta=2, influence_cap=0.1), seed=0)

    assert chosen.indices == expected


def test_decoys_pull_no_more_than_the_cap() -> None:
    """One row that a whole corner of the pool is near to, among rows that matter."""
    corner = torch.zeros(16)
    corner[0] = 1.0
    pool_ND = torch.cat([POOL, corner + 0.01 * normal(100, 16, 3)])
    task_MD = torch.cat([TASK, corner[None]])

    free, held = (
        choose(pool_ND, task_MD, 40, Selection(method="max_quality", influence_cap=cap), 0) for cap in (1.0, 0.05)
    )

    assert sum(i >= 200 for i in free.indices) == 40
    assert sum(i >= 200 for i in held.indices) <= 2


def test_what_the_cap_refuses_is_chosen_for_diversity() -> None:
    """With one customer row the cap leaves k / 10 rows to relevance."""
    chosen = choose(POOL, TASK[:1], 40, Selection(influence_cap=0.1), seed=0)
    steered = dpp.select(POOL, TASK[:1], 4)

    assert chosen.indices[:4] == steered
    assert len(chosen.indices) == 40


def test_reserved_rows_are_not_chosen_again_as_copies() -> None:
    pool_ND = POOL[:40].repeat(3, 1)
    chosen = choose(pool_ND, TASK, 30, Selection(reserve=0.5), seed=0)
    assert len({i % 40 for i in chosen.indices}) == 30
