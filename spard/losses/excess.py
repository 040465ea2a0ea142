r"""Excess loss: the rise of each safe row's loss above the base model's own loss on that row.

    E(theta) = mean over the rows i of a batch of [ l_i(theta) - l_i(theta_0) ]_+

where l_i is the mean cross-entropy over the answer of row i, or over its first tokens, and theta_0 the model before
training. E(theta_0) is 0 for every batch, whereas the mean of a few l_i exceeds the mean of all of them half of the
time. Because of [ ]_+, rows that improved do not make up for a row that got worse.

A variant (`spard.pipeline.augment`) is compared with its plain twin: a request with a trigger must be refused like the
plain one. If the variant were compared with itself, a base model that complies behind a trigger could go on complying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spard.data.batches import Batch
from spard.data.chat import Encoded
from spard.losses.constrained_sft import reference_losses
from spard.losses.cross_entropy import PREFIX, TokenLosses


def tolerance(rows: int) -> float:
    """Return the largest E, in nats per token, over a batch of `rows` rows that is no violation yet.

    A greedy answer changes when its first token falls to even odds: an excess of ln 2 on that token, so ln 2 / PREFIX
    per token of the prefix. The tolerance allows this for one row of the batch and none for the others.

        >>> round(tolerance(4), 4)  # ln 2 / (4 * 4)
        0.0433
    """
    return math.log(2) / (PREFIX * rows)


def base_losses(model: Any, rows: Sequence[Encoded], pad_id: int) -> Tensor:
    """Return the reference losses of each safe row, `[N, 2]`: mean and prefix loss under the model as it is now.

    A row with a `twin` gets the losses of the row at that index.
    """
    own = [i for i, row in enumerate(rows) if row.twin is None]
    losses = reference_losses(model, [rows[i] for i in own], pad_id)
    means = {i: torch.stack([loss_S.mean(), loss_S[:PREFIX].mean()]) for i, loss_S in zip(own, losses, strict=True)}
    return torch.stack([means[i if row.twin is None else row.twin] for i, row in enumerate(rows)])


def row_means(losses: TokenLosses, batch: Batch) -> Tensor:
    """Return the mean and prefix loss of each row of a batch, `[B, 2]`; 0 for a row without labels."""

    def means(weight_S: Tensor) -> Tensor:
        total_B = batch.on_grid(losses.loss_S * weight_S).sum(dim=1)
        return total_B / batch.on_grid(weight_S.to(losses.loss_S)).sum(dim=1).clamp(min=1)

    return torch.stack([means(torch.ones_like(losses.prefix_S)), means(losses.prefix_S)], dim=1)
