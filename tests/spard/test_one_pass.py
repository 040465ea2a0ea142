"""What a job reads of a pool that lies in files: each row once, then the most relevant ones; and what it tokenizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spard.config import Recipe, Selection
from spard.config.run_spec import RunSpec
from spard.data.rows import Example, read_examples
from spard.errors import InvalidPool
from spard.evaluation.row_risk import rank
from spard.models.base import Base
from spard.pipeline import select
from spard.pipeline.context import Context
from spard.pipeline.messages import Message, Reporter
from spard.selection import dpp, relevance
from spard.selection.select import choose
from spard.selection.shards import Shards
from tests.spard.oracles import greedy_map
from tests.spard.test_run import write_run
from tests.spard.test_shards import POOLS, clustered_rows, map_pool, normal

TASK = 24  # rows of the training file


class Noted(Shards):
    """Notes which rows are read, and counts their bytes."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__(parts)
        self.begin()

    def begin(self) -> None:
        self.rows: list[int] = []
        self.bytes = 0

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        found = super().__getitem__(rows)
        self.rows += range(len(self))[rows] if isinstance(rows, slice) else torch.as_tensor(rows).tolist()
        self.bytes += found.nbytes
        return found


@pytest.fixture
def spec(model_folder: Callable[..., Path], tmp_path: Path) -> RunSpec:
    return write_run(model_folder(), tmp_path)


@pytest.fixture
def ask(spec: RunSpec, base: Base) -> Callable[..., Context]:
    def context(*, heard: list[Message] | None = None, **selection: object) -> Context:
        recipe = Recipe(selection=Selection(**selection))  # type: ignore[arg-type]
        return Context(replace(spec, recipe=recipe), base, Reporter((heard if heard is not None else []).append))

    return context


@pytest.fixture
def examples(spec: RunSpec) -> list[Example]:
    return read_examples(spec.training_file)


def none(rows: Sequence[int]) -> list[int]:
    """Name no row as too long."""
    return []


def test_a_job_reads_each_row_once_and_the_most_relevant_ones_again(
    tmp_path: Path, ask: Callable[..., Context], examples: list[Example]
) -> None:
    pool_ND, one = clustered_rows(30_000, 1), 24 * 4
    task_MD = pool_ND[:3].repeat(8, 1) + 0.2 * normal(TASK, 2)  # a few clusters are near
    shards, context = Noted(map_pool(pool_ND, tmp_path, range(4096, 30_000, 4096))._parts), ask(min_examples=12)
    trained = list(range(TASK - 4))

    near = select.look(context, task_MD, trained, shards, relevance.total(pool_ND))
    assert shards.bytes <= pool_ND.nbytes + TASK * one  # and once more what is nearest to a training row
    assert sorted(shards.rows[: len(pool_ND)]) == list(range(len(pool_ND)))

    shards.begin()
    select.rank_risks(context, examples, task_MD, shards, near, ())
    assert shards.bytes == 0

    chosen = select.run(context, task_MD[trained], shards, near, none)
    again = set(shards.rows)
    most_relevant = dpp.quality(pool_ND, task_MD[trained]).sort(descending=True, stable=True).indices
    assert again == set(most_relevant[: len(again)].tolist())
    assert shards.bytes < pool_ND.nbytes / 3
    assert list(chosen.indices) == greedy_map(pool_ND, dpp.quality(pool_ND, task_MD[trained]), 12)

    shards.begin()
    select.keep_map(context, trained, task_MD[trained], shards, chosen)
    assert shards.bytes == (300 + len(chosen.indices)) * one


def test_rows_that_are_far_are_not_read_again_however_many_there_are(
    ask: Callable[..., Context],
) -> None:
    near_ND, far_ND = clustered_rows(3000, 1), -clustered_rows(40_000, 3).abs()
    task_MD = clustered_rows(3000, 1)[:TASK].abs()
    again = []
    for rows in (10_000, 40_000):
        pool_ND = torch.cat([near_ND.abs(), far_ND[:rows]])
        shards, context = (
            Noted([pool_ND[i : i + 4096] for i in range(0, len(pool_ND), 4096)]),
            ask(min_examples=12, beta=8),
        )
        near = select.look(context, task_MD, range(TASK), shards, relevance.total(pool_ND))
        shards.begin()
        select.run(context, task_MD, shards, near, none)
        again.append(set(shards.rows))
    assert all(rows < set(range(len(near_ND))) for rows in again)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_pass_finds_what_the_pool_in_memory_does(
    tmp_path: Path, ask: Callable[..., Context], examples: list[Example], name: str, seed: int
) -> None:
    """Ties, exact copies, rows of zeros and rows in bfloat16."""
    order = torch.randperm(len(POOLS[name]), generator=torch.Generator().manual_seed(seed))
    pool_ND = POOLS[name][order]
    task_MD = torch.cat([clustered_rows(TASK - 4, seed).to(pool_ND.dtype), pool_ND[:4]])
    shards, context = map_pool(pool_ND, tmp_path, [1, 700, 701, 1500]), ask(min_examples=40)

    near = select.look(context, task_MD, range(TASK), shards, relevance.total(shards))
    chosen = select.run(context, task_MD, shards, near, none)

    q_N = dpp.quality(pool_ND, task_MD)
    assert torch.equal(near.to_task[0], q_N)
    in_memory = choose(pool_ND, task_MD, 40, Selection(min_examples=40), 0)
    assert list(chosen.indices) == in_memory.indices
    assert list(chosen.indices)[: in_memory.rank] == greedy_map(pool_ND, q_N, 40)
    assert rank(examples, task_MD, shards, near=near.to_pool) == rank(examples, task_MD, pool_ND)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("options", [{}, {"reserve": 0.3, "influence_cap": 0.4}])
def test_rows_that_are_too_long_might_as_well_not_be_there(
    ask: Callable[..., Context], share: float, options: dict[str, float]
) -> None:
    pool_ND, task_MD = POOLS["every_row_often"], clustered_rows(TASK, 5)
    generator = torch.Generator().manual_seed(3)
    long = {i for i, x in enumerate(torch.rand(len(pool_ND), generator=generator).tolist()) if x < share}
    asked: set[int] = set()
    heard: list[Message] = []

    def too_long(rows: Sequence[int]) -> list[int]:
        asked.update(rows)
        return [i for i in rows if i in long]

    context = ask(heard=heard, min_examples=30, **options)
    near = select.look(context, task_MD, range(TASK), pool_ND, relevance.total(pool_ND))
    chosen = select.run(context, task_MD, pool_ND, near, too_long)

    fits = [i for i in range(len(pool_ND)) if i not in long]
    assert (
        list(chosen.indices) == choose(pool_ND, task_MD, min(30, len(fits)), context.recipe.selection, 0, fits).indices
    )
    assert set(chosen.indices) <= asked
    assert len(asked) < 120 or share > 0.75
    assert bool([message for message in heard if message["kind"] == "warning"]) == bool(asked & long)


def test_a_pool_of_rows_that_are_all_too_long_is_refused(ask: Callable[..., Context]) -> None:
    pool_ND, context = clustered_rows(50), ask(min_examples=10)
    near = select.look(context, clustered_rows(TASK), range(TASK), pool_ND, relevance.total(pool_ND))
    with pytest.raises(InvalidPool, match="every safe row"):
        select.run(context, clustered_rows(TASK), pool_ND, near, list)
