"""Selection on the real pool: 8,752 safe answers to harmful requests, where they are at hand.

They are looked for in SPARD_DATA or in `shared/data` beside the checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.selection import hash_features, read_texts
from spard.selection import dpp
from tests.spard.oracles import greedy_map

DATA = Path(os.environ.get("SPARD_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
POOLS = [DATA / "beavertails_safe.jsonl", DATA / "i_beavertails_safe.jsonl"]
TASK = DATA / "gsm8k_train.jsonl"

pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in [*POOLS, TASK]), reason="the real rows are not part of the repository"
)


@pytest.fixture(scope="module")
def pool() -> Tensor:
    return hash_features([text for path in POOLS for text in read_texts(path)], 128)


@pytest.fixture(scope="module")
def relevance(pool: Tensor) -> Tensor:
    return dpp.quality(pool, hash_features(read_texts(TASK)[:1500], 128))


def test_the_order_on_the_real_pool_is_that_of_the_definition(pool: Tensor, relevance: Tensor) -> None:
    assert len(pool) == 8752
    assert dpp.greedy(pool, relevance, 110).indices == greedy_map(pool, relevance, 110)


def test_repeated_real_prompts_are_not_picked_twice(pool: Tensor, relevance: Tensor) -> None:
    texts = [text for path in POOLS for text in read_texts(path)]

    picked = dpp.greedy(pool, relevance, 110).indices

    assert len({texts[i] for i in picked}) == len(picked)


def test_relevance_alone_repeats_itself_more(pool: Tensor, relevance: Tensor) -> None:
    diverse = dpp.greedy(pool, relevance, 110).indices
    relevant = relevance.argsort(descending=True)[:110].tolist()

    def likeness(rows: list[int]) -> float:
        cosine = pool[rows] @ pool[rows].T / pool[rows].norm(dim=1).outer(pool[rows].norm(dim=1))
        return float(cosine.mean())

    assert likeness(diverse) < likeness(relevant)
