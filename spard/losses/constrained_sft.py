"""Constrained fine-tuning (Qi et al., 2025): lower the weight of tokens that training has already made likelier.

    w_t = 2 sigmoid(beta_t (log P_reference - log P_model)), at least 1e-3, multiplies the cross-entropy of token t

with the model before training as the reference. beta is large for the first answer tokens, which decide between
refusal and answer, so they can move little; later tokens train almost as usual. The weights carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spard.data.batches import collate
from spard.data.chat import Encoded
from spard.losses.cross_entropy import TokenLosses, token_losses
from spard.models.budget import in_passes

BETA = 0.1
BETA_FIRST = 5 * BETA  # for the first answer token
BETA_EARLY = 20 * BETA  # for the tokens after it, up to number EARLY
EARLY = 5
LEAST = 1e-3


def weighted_losses(losses: TokenLosses, reference_S: Tensor) -> Tensor:
    """Return the weighted cross-entropy of each labeled token, `[S]`, given the reference model's cross-entropy."""
    place_S = losses.place_S
    beta_S = torch.full_like(reference_S, BETA).masked_fill(place_S <= EARLY, BETA_EARLY)
    beta_S = beta_S.masked_fill(place_S == 1, BETA_FIRST)
    weight_S = 2 * torch.sigmoid(beta_S * (losses.loss_S.detach() - reference_S))
    return weight_S.clamp(min=LEAST) * losses.loss_S


@torch.no_grad()
def reference_losses(model: Any, rows: Sequence[Encoded], pad_id: int) -> list[Tensor]:
    """Return the cross-entropy of each row's labeled tokens in nats, one tensor per row, without dropout.

    The model's training mode is restored.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: dict[int, Tensor] = {}

    def batch_losses(places: list[int]) -> tuple[Tensor, ...]:
        batch = collate([rows[i] for i in places], pad_id, device)
        return torch.split(token_losses(model, batch).loss_S, list(batch.labels))

    for places, losses in in_passes(model, [len(row.ids) for row in rows], batch_losses):
        found |= dict(zip(places, losses, strict=True))
    model.train(was_training)
    return [found[i] for i in range(len(rows))]
