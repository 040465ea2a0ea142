from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spard.errors import InvalidData
from spard.selection import dpp
from tests.spard.oracles import cosines, greedy_map


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def language_like(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Embeddings of text: a common direction and a falling spectrum."""
    return normal(rows, columns, seed) * torch.logspace(0, -1.5, columns) + normal(1, columns, 99)


POOLS = {
    "random": normal(3000, 48),
    "language_like": language_like(3000, 48),
    "every_row_twice": language_like(700, 32).repeat(2, 1),
    "every_row_often": language_like(15, 8).repeat(300, 1),
    "copies_of_other_length": torch.cat([language_like(400, 16), 3 * language_like(400, 16)]),
    "low_rank": normal(2000, 7) @ normal(7, 40, 1),
    "float64": language_like(900, 24).double(),
    "bfloat16": language_like(2500, 48).bfloat16(),
    "float16": language_like(900, 48).half(),
    "one_hot": torch.eye(12).repeat(60, 1),
    "fewer_rows_than_columns": normal(20, 64),
    "one_column": normal(30, 1),
    "one_row": normal(1, 5),
    "with_zero_rows": torch.cat([torch.zeros(5, 12), normal(300, 12)]),
}


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("name", POOLS)
def test_the_order_is_that_of_the_definition(name: str, beta: float) -> None:
    pool_ND = POOLS[name]
    q_N = dpp.quality(pool_ND, language_like(50, pool_ND.shape[1], 5))

    picked = dpp.greedy(pool_ND, q_N, 60, beta)

    assert picked.indices[: picked.rank] == greedy_map(pool_ND, q_N, 60, beta)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_the_definition_up_to_the_rank(seed: int) -> None:
    pool_ND = language_like(1500, 64, seed)
    q_N = dpp.quality(pool_ND, language_like(30, 64, seed + 50))

    picked = dpp.greedy(pool_ND, q_N, 64)

    assert picked.indices == greedy_map(pool_ND, q_N, 64)


def test_greedy_maximizes_the_determinant_at_every_pick() -> None:
    pool_ND, task_MD = normal(12, 9).double(), normal(5, 9, 1).double()
    weight_N = dpp.quality(pool_ND, task_MD, beta=2)
    L_NN = weight_N.outer(weight_N) * cosines(pool_ND, pool_ND)

    def gain(chosen: list[int], i: int) -> float:
        return float(torch.linalg.det(L_NN[[*chosen, i]][:, [*chosen, i]]))

    naive: list[int] = []
    while len(naive) < 4:
        naive.append(max((i for i in range(12) if i not in naive), key=lambda i: gain(naive, i)))

    assert dpp.select(pool_ND, task_MD, 4, beta=2) == naive


def test_a_gain_is_a_ratio_of_determinants() -> None:
    pool_ND, task_MD = normal(40, 9).double(), normal(5, 9, 1).double()
    picked = dpp.greedy(pool_ND, dpp.quality(pool_ND, task_MD), 6)
    weight_K = dpp.quality(pool_ND, task_MD, beta=4)[picked.indices]
    L_KK = weight_K.outer(weight_K) * cosines(pool_ND, pool_ND)[picked.indices][:, picked.indices]

    assert math.prod(picked.gains) == pytest.approx(float(torch.linalg.det(L_KK)), rel=1e-9)


def test_gains_only_fall() -> None:
    gains = dpp.greedy(POOLS["language_like"], torch.ones(3000), 48).gains

    assert gains == sorted(gains, reverse=True)


def test_a_window_smaller_than_the_pool_is_enough() -> None:
    picked = dpp.greedy(POOLS["language_like"], torch.ones(3000), 40)

    assert picked.sweeps > 1
    assert picked.rank == 40


def test_ties_go_to_the_lowest_index() -> None:
    assert dpp.greedy(torch.eye(900), torch.ones(900), 700).indices == list(range(700))


def test_copies_are_not_picked_before_the_rank_is_exhausted() -> None:
    pool_ND = normal(6, 10).repeat(50, 1)

    assert sorted(dpp.greedy(pool_ND, torch.ones(300), 6).indices) == list(range(6))


def test_the_rank_is_reported() -> None:
    assert dpp.greedy(POOLS["low_rank"], torch.ones(2000), 30).rank == 7


def test_past_the_rank_rows_follow_by_relevance() -> None:
    pool_ND = normal(50, 3)
    q_N = torch.rand(50, generator=torch.Generator().manual_seed(2))

    picked = dpp.greedy(pool_ND, q_N, 10)

    rest = [i for i in q_N.argsort(descending=True).tolist() if i not in picked.indices[:3]]
    assert (picked.rank, picked.indices[3:]) == (3, rest[:7])


def test_past_the_rank_copies_come_last() -> None:
    pool_ND = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    q_N = torch.tensor([1.0, 1.0, 0.9, 0.5])

    assert dpp.greedy(pool_ND, q_N, 4).indices == [0, 2, 3, 1]


def test_irrelevant_rows_are_never_picked_for_diversity() -> None:
    pool_ND = torch.eye(6)
    q_N = torch.tensor([0.0, 0.5, 0.0, 0.7, 0.0, 0.0])

    picked = dpp.greedy(pool_ND, q_N, 3)

    assert (picked.rank, picked.indices) == (2, [3, 1, 0])


def test_tiny_relevances_keep_their_order() -> None:
    q_N = torch.tensor([1e-9, 3e-9, 2e-9])

    assert dpp.greedy(torch.eye(3), q_N, 3, beta=8).indices == [1, 2, 0]


def test_powers_that_underflow_keep_their_order() -> None:
    q_N = torch.tensor([0.001, 0.003, 0.002], dtype=torch.float64)

    assert dpp.greedy(torch.eye(3), q_N, 3, beta=64).indices == [1, 2, 0]


def test_the_length_of_an_embedding_does_not_matter() -> None:
    pool_ND, task_MD = language_like(500, 24), language_like(30, 24, 3)
    scale_N = torch.logspace(-12, 12, 500)

    scaled = dpp.select(pool_ND * scale_N.unsqueeze(1), task_MD * 1e6, 20)

    assert scaled == dpp.select(pool_ND, task_MD, 20)


def test_a_shuffled_pool_gives_the_same_rows() -> None:
    pool_ND, task_MD = language_like(1200, 24), language_like(30, 24, 3)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(1))

    shuffled = dpp.select(pool_ND[order], task_MD, 20)

    assert order[shuffled].tolist() == dpp.select(pool_ND, task_MD, 20)


@pytest.mark.parametrize(("k", "expected"), [(0, 0), (5, 5), (30, 30), (99, 30)])
def test_k_is_capped_by_the_pool(k: int, expected: int) -> None:
    picked = dpp.select(normal(30, 4), normal(3, 4, 1), k)

    assert len(set(picked)) == len(picked) == expected


def test_an_empty_pool_gives_nothing() -> None:
    assert dpp.select(torch.zeros(0, 4), normal(3, 4), 5) == []


def test_without_task_rows_nothing_is_relevant() -> None:
    picked = dpp.greedy(normal(9, 4), dpp.quality(normal(9, 4), torch.zeros(0, 4)), 3)

    assert (picked.rank, picked.indices) == (0, [0, 1, 2])


def test_relevance_is_the_largest_cosine() -> None:
    pool_ND, task_MD = normal(2500, 40), normal(4300, 40, 1)

    torch.testing.assert_close(
        dpp.quality(pool_ND, task_MD), cosines(pool_ND, task_MD).amax(dim=1).clamp(0, 1), rtol=1e-6, atol=1e-7
    )


def test_relevance_of_bfloat16_rows_is_not_rounded_to_bfloat16() -> None:
    pool_ND, task_MD = language_like(300, 256).bfloat16(), language_like(300, 256, 1).bfloat16()

    torch.testing.assert_close(
        dpp.quality(pool_ND, task_MD, 8), cosines(pool_ND, task_MD).amax(dim=1).clamp(0, 1).pow(8), rtol=1e-6, atol=0
    )


def test_opposite_embeddings_are_irrelevant_even_for_even_beta() -> None:
    assert dpp.quality(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), beta=4).item() == 0.0


def test_a_fractional_beta_keeps_opposite_embeddings_finite() -> None:
    assert dpp.quality(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 0.0]]), beta=2.5).item() == 0.0


def test_a_row_of_the_task_is_fully_relevant() -> None:
    assert dpp.quality(normal(1, 7), normal(1, 7)).item() == pytest.approx(1.0, abs=1e-14)  # seven terms in float64


def test_an_embedding_that_is_not_finite_is_refused() -> None:
    with pytest.raises(InvalidData, match="not finite"):
        dpp.quality(torch.tensor([[math.nan, 1.0]]), normal(2, 2))


def test_products_that_a_process_lets_be_cut_short_change_nothing() -> None:
    pool_ND, task_MD = POOLS["language_like"], language_like(50, 48, 5)
    exact = dpp.select(pool_ND, task_MD, 40)

    torch.set_float32_matmul_precision("medium")
    try:
        assert dpp.select(pool_ND, task_MD, 40) == exact
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_inputs_are_left_as_they_were() -> None:
    pool_ND, q_N = normal(400, 8), torch.ones(400, dtype=torch.float64)

    dpp.greedy(pool_ND, q_N, 8)

    assert torch.equal(pool_ND, normal(400, 8))
    assert bool((q_N == 1).all())
