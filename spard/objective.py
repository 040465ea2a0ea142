"""The losses of one run as functions of its parameters, on the rows that the training loop names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch

from spard import ranks
from spard.anchor import Anchor
from spard.config import Defense, Lisa, NoDefense, Ptst, Recipe, SafeGrad, SafeInstr, SafeLora, Spard
from spard.constrained import reference_losses
from spard.data import Batch, Encoded, collate
from spard.divergence import reference_of
from spard.grads import Gradient, Loss, safe_divergence, safe_losses, utility_gradient
from spard.lora import dropping_modules
from spard.methods import clips_itself
from spard.methods.safeinstr import mixed
from spard.models import Base, adapters_off
from spard.vectors import Vector


class Objective:
    """Task and safe rows, and the gradients that the recipe's defence asks for.

    Made before the first step: what is compared with the base model is kept from then.
    """

    def __init__(self, base: Base, task: Sequence[Encoded], safe: Sequence[Encoded], recipe: Recipe) -> None:
        self.base, self.safe, self.recipe = base, safe, recipe
        self.plain = [row for row in safe if not row.is_variant]
        self.task = mixed(task, safe) if isinstance(recipe.defense, SafeInstr) else task
        self.max_norm = float("inf") if clips_itself(recipe.defense) else recipe.max_grad_norm
        self.dropping = dropping_modules(base.model)
        has_lora, pad_id = recipe.lora is not None, base.tokenizer.pad_token_id
        self.reference = reference_of(base.model, has_lora=has_lora) if isinstance(recipe.defense, SafeGrad) else None
        with adapters_off(base.model):  # an adapter that the run goes on from is no reference
            self.before = reference_losses(base.model, self.task, pad_id) if recipe.constrained_sft else []
            self.anchor = Anchor(base.model, self.plain, pad_id, recipe.anchor) if recipe.anchor else None

    def task_gradient(self, theta: Vector, rows: Sequence[int], anchors: Sequence[int] = ()) -> Gradient:
        """The task loss on some rows and its gradient, in pieces that fit into memory."""
        self._set_dropout(True)
        rows = ranks.share(rows)
        piece = self.recipe.micro_batch_size or max(1, len(rows))
        cut = [rows[i : i + piece] for i in range(0, len(rows), piece)]
        prompts, penalty = self.anchor.riding(anchors) if self.anchor and ranks.own() == 0 else ([], None)
        parts = [[self.task[row] for row in part] for part in cut]
        pieces = [self._batch([*part, *(prompts if i == 0 else [])]) for i, part in enumerate(parts)]
        references = [torch.cat([self.before[row] for row in part]) for part in cut] if self.before else []
        return utility_gradient(self.base.model, theta, pieces, self.max_norm, references, penalty)

    def safe_losses(self, theta: Vector, rows: Sequence[int]) -> dict[str, Loss]:
        """The safe losses on some safe rows, without dropout."""
        self._set_dropout(False)
        rows = ranks.share(rows)
        batch = self._batch([self.safe[row] for row in rows]) if rows else None
        if self.reference:
            return safe_divergence(self.base.model, theta, batch, self.reference)
        return safe_losses(self.base.model, theta, batch)

    def _set_dropout(self, on: bool) -> None:
        """A mode, not a context: gradient checkpointing runs the forward pass again inside the backward pass."""
        for module in self.dropping:
            module.training = on

    def _batch(self, rows: Sequence[Encoded]) -> Batch:
        return collate(rows, self.base.tokenizer.pad_token_id, self.base.device)


def safe_batch_size(defense: Defense, batch_size: int) -> int:
    """How many safe rows a step looks at, in a run of this batch size."""
    match defense:
        case Spard():
            return defense.safe_batch_size
        case Lisa() | SafeGrad():
            return batch_size if defense.safe_batch_size == "auto" else defense.safe_batch_size
        case NoDefense() | Ptst() | SafeInstr() | SafeLora():
            return 0
        case _:
            assert_never(defense)
