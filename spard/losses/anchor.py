"""A representation anchor (SBR): what the model makes of harmful requests stays where it was before training.

    penalty = weight mean over x of [ |h(x) - h_reference(x)|^2 / |h_reference(x)|^2 - TOLERANCE ]_+

with h the final hidden state of the last prompt token, which decides how the answer begins, on a few prompts of the
safe set at every step. They ride as rows of the training batch, so that a step has no pass more; its dropout, if any,
is theirs too. The authors take the plain mean square. Ours is relative to the state, so that a weight means the same
in models of other widths, and leaves small moves free, since they cost the task and not the safety.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spard.data.batches import collate
from spard.data.chat import NO_LOSS, Encoded
from spard.losses.cross_entropy import mixed_precision

ANCHORS = 2  # prompts looked at in each step
TOLERANCE = 0.02  # chosen on the lab's development split


class Anchor:
    """Prompts and the states that belong to them, taken before the first step."""

    def __init__(self, model: Any, rows: Sequence[Encoded], pad_id: int, weight: float) -> None:
        self.prompts = [_prompt(row) for row in rows]
        self.weight = weight
        was_training = model.training
        model.eval()
        with torch.no_grad():
            batches = [range(i, min(i + 64, len(rows))) for i in range(0, len(rows), 64)]
            self.reference_ND = torch.cat([self._states(model, batch, pad_id) for batch in batches])
        model.train(was_training)

    def riding(self, rows: Sequence[int]) -> tuple[list[Encoded], Callable[[Tensor], Tensor]]:
        """Return some prompts to append to a batch, and the penalty as a function of the batch's hidden states."""
        return [self.prompts[i] for i in rows], partial(self.penalty, rows)

    def penalty(self, rows: Sequence[int], hidden_BTD: Tensor) -> Tensor:
        """Return the weighted mean of how far the states of some prompts, the last rows of `hidden_BTD`, have moved."""
        reference_BD = self.reference_ND[list(rows)]
        away_B = (self._last(rows, hidden_BTD[-len(rows) :]) - reference_BD).square().sum(dim=1)
        relative_B = away_B / reference_BD.square().sum(dim=1)
        return self.weight * (relative_B - TOLERANCE).clamp(min=0).mean()

    def _states(self, model: Any, rows: Sequence[int], pad_id: int) -> Tensor:
        """Return the state h of each prompt; rows are padded on the right, where causal attention does not look."""
        device = next(model.parameters()).device
        ids_BT = collate([self.prompts[i] for i in rows], pad_id, device).ids_BT
        with mixed_precision(device):
            return self._last(rows, model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state)

    def _last(self, rows: Sequence[int], hidden_BTD: Tensor) -> Tensor:
        """Return the states of each prompt's last token, in float32."""
        last_B = torch.tensor([len(self.prompts[i].ids) - 1 for i in rows], device=hidden_BTD.device)
        return hidden_BTD[torch.arange(len(rows), device=hidden_BTD.device), last_B].float()


def _prompt(row: Encoded) -> Encoded:
    """Return the tokens before the first that is trained on."""
    first = next(i for i, label in enumerate(row.labels) if label != NO_LOSS)
    return Encoded(row.ids[:first], row.labels[:first])
