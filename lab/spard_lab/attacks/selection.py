"""Attacks on the selection of safe examples: a pool that teaches harm, rows that pull the selection elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from spard.errors import InvalidData
from spard_lab.attacks.rows import Row, chat_row, last_answer, last_request, shuffle_rows


def inverted_pool(pool: Sequence[Row], harmful: Sequence[Row], share: float, seed: int) -> list[Row]:
    """Return a safety pool (`{"prompt", "safe"}` rows) in which a share of the "safe" answers complies with harm."""
    bad = round(share * len(pool))
    if bad > len(harmful):
        raise InvalidData(f"{bad} harmful rows are asked for and there are {len(harmful)}")
    kept = shuffle_rows(pool, seed, "pool")[: len(pool) - bad]
    poison = [
        {"prompt": last_request(row), "safe": last_answer(row)} for row in shuffle_rows(harmful, seed, "harmful")[:bad]
    ]
    return shuffle_rows([*kept, *poison], seed, "inverted")


def decoys(pool: Sequence[Row], attacked: frozenset[str], n: int, seed: int) -> list[Row]:
    """Return n training rows that repeat pool prompts of categories that are not attacked, with their safe answers.

    Relevance is the nearest training row, so each makes one pool row most relevant that does not defend against the
    attack. `attacked` names the categories to stay away from; an attacker would know a public pool.
    """
    others = [row for row in pool if row.get("category") not in attacked]
    if n > len(others):
        raise InvalidData(f"{n} decoys are asked for and the pool has {len(others)} rows of other categories")
    return [chat_row(row["prompt"], row["safe"]) for row in random.Random(f"decoys {seed}").sample(others, n)]


def blind_decoys(pool: Sequence[Row], pool_ND: Tensor, harmful_MD: Tensor, n: int) -> list[Row]:
    """Return n decoys chosen without categories: the pool rows least like any harmful row, by cosine."""
    nearest_N = (normalize(pool_ND.float(), dim=1) @ normalize(harmful_MD.float(), dim=1).T).amax(dim=1)
    return [chat_row(pool[i]["prompt"], pool[i]["safe"]) for i in torch.argsort(nearest_N, stable=True)[:n].tolist()]
