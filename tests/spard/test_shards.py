"""Selection from pools that lie in files: the same rows in the same order, and no more read than it takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spard.config import Selection
from spard.config.extensions import SELECTIONS
from spard.selection import dpp
from spard.selection.relevance import relevance
from spard.selection.select import choose
from spard.selection.shards import Shards, whole
from tests.spard.oracles import greedy_map

D = 24


def normal(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed))


def clustered_rows(rows: int, seed: int = 0) -> Tensor:
    """Few rows near the task, many far from it."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(40, D, generator=generator)
    return centers[torch.randint(40, (rows,), generator=generator)] + 0.4 * torch.randn(rows, D, generator=generator)


POOLS = {
    "clustered": clustered_rows(4000),
    "even": normal(3000),
    "every_row_often": clustered_rows(60).repeat(40, 1),
    "ties": torch.eye(D).repeat(100, 1),
    "with_zero_rows": torch.cat([torch.zeros(9, D), clustered_rows(2000)]),
    "bfloat16": clustered_rows(2500).bfloat16(),
}


def map_pool(pool_ND: Tensor, folder: Path, cuts: Sequence[int]) -> Shards:
    """Write a pool in parts and map them from their files."""
    edges = [0, *cuts, len(pool_ND)]
    parts = []
    for i, (start, stop) in enumerate(pairwise(edges)):
        save_file({"rows": pool_ND[start:stop].contiguous()}, folder / f"{i}.safetensors")
        with safe_open(folder / f"{i}.safetensors", framework="pt") as file:
            parts.append(file.get_tensor("rows"))
    return Shards(parts)


class Counted(Shards):
    """Counts the bytes that are read."""

    read = 0

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        found = super().__getitem__(rows)
        self.read += found.nbytes
        return found


@pytest.mark.parametrize("beta", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("name", POOLS)
def test_the_order_from_files_is_that_in_memory_and_of_the_definition(tmp_path: Path, name: str, beta: float) -> None:
    pool_ND = POOLS[name]
    shards = map_pool(pool_ND, tmp_path, [1, 700, 701, 1500])
    q_N = dpp.quality(shards, clustered_rows(30))
    found, held = dpp.greedy(shards, q_N, 40, beta), dpp.greedy(pool_ND, q_N, 40, beta)

    assert torch.equal(q_N, dpp.quality(pool_ND, clustered_rows(30)))
    assert found == held
    assert found.indices[: found.rank] == greedy_map(pool_ND, q_N, 40, beta)


@pytest.mark.parametrize("method", SELECTIONS.names())
@pytest.mark.parametrize("options", [{}, {"reserve": 0.3, "influence_cap": 0.2}])
def test_every_method_chooses_from_files_as_in_memory(tmp_path: Path, method: str, options: dict[str, float]) -> None:
    pool_ND, task_MD = POOLS["clustered"], clustered_rows(30)
    shards, selection = map_pool(pool_ND, tmp_path, [1024, 2500]), Selection(method=method, **options)  # type: ignore[arg-type]
    assert choose(shards, task_MD, 50, selection, 3) == choose(pool_ND, task_MD, 50, selection, 3)


@pytest.mark.parametrize("method", SELECTIONS.names())
@pytest.mark.parametrize("options", [{}, {"reserve": 0.3, "influence_cap": 0.2}])
def test_rows_that_may_be_chosen_are_as_a_pool_of_their_own(method: str, options: dict[str, float]) -> None:
    pool_ND, task_MD = clustered_rows(600), clustered_rows(30)
    among, selection = [i for i in range(600) if i % 3], Selection(method=method, **options)  # type: ignore[arg-type]
    chosen = choose(pool_ND, task_MD, 50, selection, 3, among)
    alone = choose(pool_ND[among], task_MD, 50, selection, 3)
    assert chosen.indices == [among[i] for i in alone.indices]
    assert chosen.rank == alone.rank


def test_relevance_reads_the_pool_once_and_selection_little_more(tmp_path: Path) -> None:
    pool_ND = clustered_rows(20_000, 1)
    task_MD = pool_ND[:3] + 0.2 * normal(3, 2)  # a few clusters are near
    shards = Counted(map_pool(pool_ND, tmp_path, range(4096, 20_000, 4096))._parts)

    q_N, _ = relevance(shards, task_MD)
    assert shards.read == pool_ND.nbytes
    shards.read = 0
    found = dpp.greedy(shards, q_N, 12)

    assert found.indices == greedy_map(pool_ND, q_N, 12)
    assert shards.read < pool_ND.nbytes / 2


def test_a_large_pool_is_read_once_to_rank_few_rows_by_it(tmp_path: Path) -> None:
    task_MD, pool_ND = clustered_rows(20), clustered_rows(9000, 1)
    shards = Counted(map_pool(pool_ND, tmp_path, [4000])._parts)
    cosine_N, nearest_N = relevance(task_MD, shards)
    expected = relevance(task_MD, pool_ND)
    assert torch.equal(cosine_N, expected[0])
    assert torch.equal(nearest_N, expected[1])
    assert shards.read == pool_ND.nbytes + len(task_MD) * pool_ND[0].nbytes


def test_shards_are_read_as_one_tensor() -> None:
    pool_ND = normal(10)
    shards = Shards(list(pool_ND.split(4)))
    assert shards.shape == pool_ND.shape
    for start in range(11):
        for stop in range(11):
            assert torch.equal(shards[start:stop], pool_ND[start:stop])
    rows = [9, 0, 4, 4, 3]
    assert torch.equal(shards[rows], pool_ND[rows])
    assert torch.equal(shards[torch.tensor(rows)], pool_ND[rows])
    assert torch.equal(whole(shards), pool_ND)
    assert shards[2:3].data_ptr() == pool_ND[2:3].data_ptr()  # not copied
