"""A representation anchor (SBR): what the model makes of harmful requests stays where it was before training.

    penalty = weight / D |h(x) - h_reference(x)|^2,   h the final hidden state of the last prompt token

averaged over a few prompts of the safe set at every step. The state decides how the answer begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spard.data import NO_LOSS, Encoded, collate
from spard.losses import mixed_precision

ANCHORS = 4  # prompts looked at in each step


class Anchor:
    """Prompts and the states that belong to them, taken before the first step."""

    def __init__(self, model: Any, rows: Sequence[Encoded], pad_id: int, weight: float) -> None:
        self.prompts = [_prompt(row) for row in rows]
        self.pad_id, self.weight = pad_id, weight
        was_training = model.training
        model.eval()
        with torch.no_grad():
            batches = [range(i, min(i + 64, len(rows))) for i in range(0, len(rows), 64)]
            self.reference_ND = torch.cat([self._states(model, batch) for batch in batches])
        model.train(was_training)

    def penalty(self, model: Any, rows: Sequence[int]) -> Tensor:
        """The weighted mean squared distance of some prompts' states from what they were."""
        away_BD = self._states(model, rows) - self.reference_ND[list(rows)]
        return self.weight * away_BD.square().mean()

    def _states(self, model: Any, rows: Sequence[int]) -> Tensor:
        """h of each prompt in float32; padding stands on the right, where causal attention cannot see it."""
        device = next(model.parameters()).device
        ids_BT = collate([self.prompts[i] for i in rows], self.pad_id, device).ids_BT
        last_B = torch.tensor([len(self.prompts[i].ids) - 1 for i in rows], device=device)
        with mixed_precision(device):
            states_BTD: Tensor = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
        return states_BTD[torch.arange(len(rows), device=device), last_B].float()


def _prompt(row: Encoded) -> Encoded:
    """The tokens before the first that is learnt."""
    first = next(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    return Encoded(row.ids[:first], row.labels[:first])
