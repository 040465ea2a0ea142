"""Benign rows that weaken safety: outliers by self-influence, and rows that resemble harmful ones.

Neither needs a harmful answer, so a content filter finds nothing in the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from spard.data.batches import collate
from spard.data.chat import Encoded
from spard.losses.cross_entropy import token_losses
from spard.losses.gradients import gradient
from spard.losses.vectors import norm
from spard.models.base import Base
from spard_lab.attacks.rows import Row, last_answer


def self_influence(base: Base, rows: Sequence[Encoded]) -> list[float]:
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
