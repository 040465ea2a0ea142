"""A real training run in a process that may be killed at any moment: tiny, checkpointed at every step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

import spard.training.train
from spard.config import Defense, Hyperparameters, Lora, Recipe, resolve
from spard.models.adapters import tensor_digest
from spard.models.base import load_base
from tests.spard.parts import refusals, sums

RECIPE = Recipe(
    lora=Lora(rank=4, dropout=0.1),
    hyperparameters=Hyperparameters(n_epochs=3, batch_size=6),
    learning_rate=5e-3,
    seed=5,
    checkpoint_every_s=0.0001,
)


def train(model: Path, defense: Defense, checkpoints: Path, out: Path, is_mutant: bool = False) -> None:
    """Train to the end and leave the digest of the adapter; `out`.first tells at which step this attempt began."""
    torch.set_num_threads(1)
    if is_mutant:
        torch.manual_seed = _forget
    base, recipe, begun = load_base(str(model)), replace(RECIPE, defense=defense), out.with_suffix(".first")
    begun.unlink(missing_ok=True)

    def on_step(step: int, total: int, metrics: dict[str, float]) -> None:
        if not begun.exists():
            begun.write_text(str(step))

    task, safe = sums(base), refusals(base)
    resolved = resolve(recipe, len(task), base.hidden_size)
    trained = spard.training.train.train(base, task, safe, recipe, resolved, on_step=on_step, resume_states=checkpoints)
    weights = {name: part for name, part in trained.model.named_parameters() if part.requires_grad}
    aside = out.with_suffix(".aside")
    aside.write_text(tensor_digest(weights))
    os.replace(aside, out)


def _forget(seed: int) -> torch.Generator:
    """The mutant: what is random depends on what was drawn before."""
    return torch.default_generator
