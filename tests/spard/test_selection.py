from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch
from torch import Tensor

from spard import dpp
from spard.config import Selection
from spard.selection import choose

Method = Literal["relevance_diversity", "random", "max_quality", "low_similarity"]
METHODS: tuple[Method, ...] = get_args(Method)


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


def test_low_similarity_takes_the_least_relevant_rows() -> None:
    chosen = choose(POOL, TASK, 9, Selection(method="low_similarity"), seed=0)

    assert chosen.indices == QUALITY.argsort()[:9].tolist()


def test_random_rows_follow_the_seed() -> None:
    first, again, other = (choose(POOL, TASK, 9, Selection(method="random"), seed).indices for seed in (1, 1, 2))

    assert first == again != other


def test_random_rows_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()

    choose(POOL, TASK, 9, Selection(method="random"), seed=1)

    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("method", METHODS)
def test_copies_wait_until_distinct_rows_run_out(method: Method) -> None:
    pool_ND = POOL[:8].repeat(3, 1)

    chosen = choose(pool_ND, TASK, 10, Selection(method=method), seed=0)

    assert len({i % 8 for i in chosen.indices[:8]}) == 8
    assert len(set(chosen.indices)) == 10


@pytest.mark.parametrize("method", METHODS)
def test_every_choice_has_a_relevance_and_a_gain_or_none(method: Method) -> None:
    chosen = choose(POOL, TASK, 20, Selection(method=method), seed=0)

    assert chosen.relevance == QUALITY[chosen.indices].tolist()
    assert len(chosen.gains) == 20


def test_past_the_rank_there_is_no_gain() -> None:
    chosen = choose(POOL, TASK, 20, Selection(), seed=0)

    assert chosen.rank == 16
    assert chosen.gains[16:] == [None] * 4


@pytest.mark.parametrize("method", METHODS)
def test_more_rows_than_the_pool_has_give_the_pool(method: Method) -> None:
    assert sorted(choose(POOL, TASK, 999, Selection(method=method), seed=0).indices) == list(range(200))
