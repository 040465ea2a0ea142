"""KL divergence of a model's next-token distributions from those of the model before training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from spard.data.batches import Batch
from spard.losses.cross_entropy import Head, in_chunks, labeled_states, mixed_precision, vocabulary
from spard.losses.vectors import wide
from spard.models.base import disable_adapters
from spard.models.sharding import copy_model


@dataclass(frozen=True, slots=True)
class Reference:
    """The model before training: the same weights with adapters off, or a copy in full fine-tuning.

    `frozen(model)` is the context in which `model` gives the reference's outputs.
    """

    model: Any
    frozen: Callable[[Any], AbstractContextManager[Any]]

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[Head, Tensor]:
        """Return the reference's head and its inputs at the S labeled tokens of a batch, `[S, D]`, without a graph."""
        with self.frozen(self.model):
            return labeled_states(self.model, batch)[:2]


def make_reference(model: Any, *, has_lora: bool) -> Reference:
    """Return the model as it is now as a reference; full fine-tuning holds a second model in memory for it."""
    if has_lora:
        return Reference(model, disable_adapters)
    return Reference(copy_model(model).eval().requires_grad_(False), nullcontext)


def token_divergences(model: Any, reference: Reference, batch: Batch) -> Tensor:
    """Return KL(P_reference || P_model) in nats at each labeled token, `[S]`, in float32 at least.

    Long batches are computed in chunks, so that the logits of all tokens are never in memory at once.
    """
    with mixed_precision(batch.ids_BT.device):
        fixed_head, fixed_SD = reference.states(batch)
        head, hidden_SD, _ = labeled_states(model, batch)
        (kl_S,) = in_chunks(partial(_divergence, head, fixed_head), vocabulary(model), hidden_SD, fixed_SD)
    return kl_S


def _divergence(head: Head, fixed_head: Head, hidden_SD: Tensor, fixed_SD: Tensor) -> tuple[Tensor]:
    log_p_SV = wide(head(hidden_SD)).log_softmax(dim=1)
    with torch.no_grad():
        log_fixed_SV = wide(fixed_head(fixed_SD)).log_softmax(dim=1)
    return (kl_div(log_p_SV, log_fixed_SV, reduction="none", log_target=True).sum(dim=1),)
