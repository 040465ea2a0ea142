"""Attacks on the selection of safe rows: a pool that teaches harm, rows that steer the selection away."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from spard.errors import InvalidData
from spard_lab.attacks.rows import Row, chat_row, last_answer, last_request, shuffle_rows


def inverted_pool(pool: Sequence[Row], harmful: Sequence[Row], share: float, seed: int) -> list[Row]:
    """Return a safety pool (`{"prompt", "safe"}` rows) in which a share of the "safe" answers complies with harm.

    Raises `InvalidData` if `harmful` has fewer rows than that share needs.
    """
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

    The relevance of a pool row is the cosine to its nearest training row, so each decoy gives the highest relevance to
    one pool row that does not defend against the attack. `attacked` names the categories to avoid; the attacker is
    assumed to know the pool. Raises `InvalidData` if the pool has fewer than n rows of other categories.
    """
    others = [row for row in pool if row.get("category") not in attacked]
    if n > len(others):
        raise InvalidData(f"{n} decoys are asked for and the pool has {len(others)} rows of other categories")
    return [chat_row(row["prompt"], row["safe"]) for row in random.Random(f"decoys {seed}").sample(others, n)]


def blind_decoys(pool: Sequence[Row], pool_ND: Tensor, harmful_MD: Tensor, n: int) -> list[Row]:
    """Return n decoys without use of categories: the pool rows whose largest cosine to a harmful row is smallest.

    pool_ND      embeddings of `pool`, `[N, D]`
    harmful_MD   embeddings of harmful rows, `[M, D]`
    """
    nearest_N = (normalize(pool_ND.float(), dim=1) @ normalize(harmful_MD.float(), dim=1).T).amax(dim=1)
    return [chat_row(pool[i]["prompt"], pool[i]["safe"]) for i in torch.argsort(nearest_N, stable=True)[:n].tolist()]
