"""The losses of one run as functions of its parameters, on the rows that the training loop names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spard import distributed
from spard.config import Recipe
from spard.data.batches import Batch, collate
from spard.data.chat import Encoded
from spard.losses.anchor import Anchor
from spard.losses.constrained_sft import reference_losses
from spard.losses.excess import base_losses
from spard.losses.gradients import Gradient, Loss, utility_gradient
from spard.losses.vectors import Vector
from spard.methods import Method
from spard.models.base import Base, adapters_off
from spard.models.lora import dropping_modules


class Objective:
    """Task and safe rows, and the gradients that the method asks for.

    Made before the first step: what is compared with the base model is kept from then.
    """

    def __init__(
        self, base: Base, task: Sequence[Encoded], safe: Sequence[Encoded], recipe: Recipe, method: Method[Any]
    ) -> None:
        self.base, self.safe, self.recipe, self.method = base, safe, recipe, method
        self.plain = [row for row in safe if not row.is_variant]
        self.task = method.training_rows(task, safe)
        self.max_norm = float("inf") if method.clips_gradients else recipe.max_grad_norm
        self.dropping = dropping_modules(base.model)
        pad_id, anchor = base.tokenizer.pad_token_id, recipe.effective_anchor
        method.prepare(base, has_lora=recipe.lora is not None)
        with adapters_off(base.model):  # an adapter that the run goes on from is no reference
            self.before = reference_losses(base.model, self.task, pad_id) if recipe.constrained_sft else []
            self.anchor = Anchor(base.model, self.plain, pad_id, anchor) if anchor else None

    def task_gradient(self, theta: Vector, rows: Sequence[int], anchors: Sequence[int] = ()) -> Gradient:
        """Return the task loss on some rows and its gradient, computed in micro-batches that fit the memory."""
        self._set_dropout(True)
        rows = distributed.share(rows)
        piece = self.recipe.micro_batch_size or max(1, len(rows))
        cut = [rows[i : i + piece] for i in range(0, len(rows), piece)]
        prompts, penalty = self.anchor.riding(anchors) if self.anchor and distributed.own() == 0 else ([], None)
        parts = [[self.task[row] for row in part] for part in cut]
        pieces = [self._batch([*part, *(prompts if i == 0 else [])]) for i, part in enumerate(parts)]
        references = [torch.cat([self.before[row] for row in part]) for part in cut] if self.before else []
        return utility_gradient(self.base.model, theta, pieces, self.max_norm, references, penalty)

    def safe_losses(self, theta: Vector, rows: Sequence[int]) -> Mapping[str, Loss]:
        """Return the method's safe losses on some safe rows, without dropout."""
        self._set_dropout(False)
        rows = distributed.share(rows)
        batch = self._batch([self.safe[row] for row in rows])._replace(rows=tuple(rows)) if rows else None
        return self.method.safe_losses(self.base.model, theta, batch)

    def base_losses(self) -> Tensor:
        """Return what each safe row is compared with, N x 2; the model is the base model while this is called."""
        return base_losses(self.base.model, self.safe, self.base.tokenizer.pad_token_id)

    def _set_dropout(self, on: bool) -> None:
        """Set dropout for good, not for a block: gradient checkpointing runs the forward pass again in the backward."""
        for module in self.dropping:
            module.training = on

    def _batch(self, rows: Sequence[Encoded]) -> Batch:
        return collate(rows, self.base.tokenizer.pad_token_id, self.base.device)
