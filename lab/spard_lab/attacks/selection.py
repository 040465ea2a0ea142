"""Attacks on the selection of safe rows, and benign rows that weaken safety.

A pool can teach harm, and rows can steer the selection away. Outliers by self-influence and rows that resemble harmful
ones need no harmful answer, so a content filter finds nothing in the file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from spard.data.batches import collate
from spard.data.chat import EncodedSample
from spard.errors import InvalidData
from spard.losses.cross_entropy import token_losses
from spard.losses.gradients import gradient
from spard.losses.vectors import norm
from spard.models.base import Base
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


def self_influence(base: Base, rows: Sequence[EncodedSample]) -> list[float]:
    """Return |grad L(z)|^2 of each row z alone, its effect on the model (Pruthi et al., 2020).

    The gradient of the mean token loss is over all parameters that require one.
    """
    theta = [weight for weight in base.model.parameters() if weight.requires_grad]
    found = []
    for row in rows:
        batch = collate([row], base.tokenizer.pad_token_id, base.device)
        found.append(float(norm(gradient(token_losses(base.model, batch).loss_S.mean(), theta))) ** 2)
    return found


def benign_outliers(rows: Sequence[Row], influence: Sequence[float], n: int) -> list[Row]:
    """Return the n rows of largest log(influence + 1) + log(answer length + 1) (Self-Inf-N, Guan et al., 2025).

    The length, in characters, is added because influence alone picks one-word answers.
    """
    scores = [math.log1p(each) + math.log1p(len(last_answer(row))) for row, each in zip(rows, influence, strict=True)]
    return [rows[i] for i in sorted(range(len(rows)), key=lambda i: -scores[i])[:n]]


def nearest_to_harm(rows: Sequence[Row], rows_ND: Tensor, harmful_MD: Tensor, n: int) -> list[Row]:
    """Return the n benign rows with the largest cosine to the mean harmful embedding (He et al., 2024).

    rows_ND      embeddings of `rows`, `[N, D]`
    harmful_MD   embeddings of harmful rows, `[M, D]`
    """
    harm_D = normalize(harmful_MD.float(), dim=1).mean(dim=0)
    cosine_N = normalize(rows_ND.float(), dim=1) @ normalize(harm_D, dim=0)
    return [rows[i] for i in torch.argsort(cosine_N, descending=True, stable=True)[:n].tolist()]
