"""What is trained: LoRA layers put into the base model, or all of it."""

from __future__ import annotations

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
        _renamed(model, "enable")({"use_reentrant": False})
    return trainable.train()


def stop_gradient_checkpointing(model: Any) -> None:
    """Undo what `trainable_model` switched on."""
    _renamed(model, "disable")()


def dropping_modules(model: Any) -> list[torch.nn.Module]:
    """Dropout layers, and attention layers that call dropout as a function, of a positive rate.

    They alone are switched off for the safe losses: gradient checkpointing needs the others in training mode.
    """
    return [module for module in model.modules() if _rate(module) > 0]


def _renamed(model: Any, what: str) -> Any:
    """transformers 5.23 calls activation checkpointing what 5.3 calls gradient checkpointing, and warns."""
    new, old = f"activation_checkpointing_{what}", f"gradient_checkpointing_{what}"
    return getattr(model, new if hasattr(model, new) else old)


def _rate(module: torch.nn.Module) -> float:
    rate = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0


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
