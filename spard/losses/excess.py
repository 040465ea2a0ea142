r"""Excess loss: how far the loss on each safe row has risen above the base model's own on that very row.

    E(theta) = mean over the rows i looked at of [ l_i(theta) - l_i(theta_0) ]_+

with l_i the mean cross-entropy over the answer of row i, or over its first tokens, and theta_0 the model before
training. At theta_0 it is 0 whichever rows are looked at, where the mean of a few l_i is above the mean of all of them
half of the time; and rows that got better do not make up for one that got worse.

A variant (`spard.pipeline.augment`) is compared with its plain twin, not with itself: a dressed request must be refused
as the plain one is, and a base model that complies behind a dress would else be allowed to go on complying.
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
    """Return the nats per token that E over so many rows may reach before it counts as a violation.

    A greedy answer changes when its first token falls to even odds, an excess of ln 2 there and of ln 2 / PREFIX per
    token of the prefix. So much on a single one of the rows, with none on the others, is what is still let pass.
    """
    return math.log(2) / (PREFIX * rows)


def base_losses(model: Any, rows: Sequence[Encoded], pad_id: int) -> Tensor:
    """Return what each safe row is compared with, N x 2: its mean and its prefix loss under the model as it is.

    A row with a `twin` gets those of the row at that place.
    """
    own = [i for i, row in enumerate(rows) if row.twin is None]
    losses = reference_losses(model, [rows[i] for i in own], pad_id)
    means = {i: torch.stack([loss_S.mean(), loss_S[:PREFIX].mean()]) for i, loss_S in zip(own, losses, strict=True)}
    return torch.stack([means[i if row.twin is None else row.twin] for i, row in enumerate(rows)])


def row_means(losses: TokenLosses, batch: Batch) -> Tensor:
    """Return each row's mean and prefix loss, B x 2, from the token losses of a batch; 0 for a row without labels."""

    def means(weight_S: Tensor) -> Tensor:
        total_B = batch.on_grid(losses.loss_S * weight_S).sum(dim=1)
        return total_B / batch.on_grid(weight_S.to(losses.loss_S)).sum(dim=1).clamp(min=1)

    return torch.stack([means(torch.ones_like(losses.prefix_S)), means(losses.prefix_S)], dim=1)
