"""What is trained: LoRA layers put into the base model, or all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from spard.config import Lora, Recipe
from spard.errors import InvalidRecipe

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def trainable_model(model: Any, recipe: Recipe) -> Any:
    """The model with exactly the recipe's parameters trainable, in float32; LoRA starts from the recipe's seed.

    Seeds the global generator: the caller restores it.
    """
    torch.manual_seed(recipe.seed)
    trainable = model.float().requires_grad_(True) if recipe.lora is None else _with_lora(model, recipe.lora)
    if recipe.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return trainable.train()


@contextmanager
def dropout_off(model: Any) -> Iterator[None]:
    """Let nothing be dropped, and leave gradient checkpointing, which needs the training mode, as it is."""
    dropping = [module for module in model.modules() if module.training and _drops(module)]
    for module in dropping:
        module.training = False
    try:
        yield
    finally:
        for module in dropping:
            module.training = True


def _drops(module: torch.nn.Module) -> bool:
    """Whether it is a dropout layer, or an attention layer that calls dropout as a function."""
    rate = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0)
    return isinstance(rate, float) and rate > 0


def _with_lora(model: Any, lora: Lora) -> Any:
    targets = lora.target_modules or ATTENTION
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    unknown = sorted(set(targets) - linear)
    if unknown:
        raise InvalidRecipe(
            f"lora.target_modules: the model has no {', '.join(unknown)}; it has {', '.join(sorted(linear))}",
            "lora.target_modules",
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # divided by the rank: a fraction does as well
        lora_dropout=lora.dropout,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
