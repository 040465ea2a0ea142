"""Makes a model trainable: with LoRA layers, or all of its weights.

The layout of a loaded model, its linear layers by path, is that from which `spard.models.targets` chooses.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from spard.config import Lora, Recipe
from spard.digests import MANIFEST, file_sha256
from spard.errors import AdapterMismatch, UnsupportedModule
from spard.models.base import Base
from spard.models.peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from spard.models.sharding import retype_, whole_sizes
from spard.models.targets import (
    EXPERTS,
    Layout,
    Linear,
    Reach,
    adapted_layers,
    head_count,
    layer_stack,
    reach,
    refusal,
    resolved_targets,
)

_SKIP = "D"  # a state space's skip connection weight


def inspect_layout(model: Any) -> Layout:
    """Return the layout of a transformers model without adapters, in any dtype or quantization."""
    modules = {name: module for name, module in model.named_modules() if name}
    linears = {name: _linear(name, module) for name, module in modules.items() if _is_linear(module)}
    stack, layers = _stack(model, modules, linears)
    own = {name: list(module.named_parameters(recurse=False)) for name, module in modules.items()}
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    # A tied head shares the embeddings' weights: count them once.
    weights = sum(each.weights for name, each in linears.items() if not (is_tied and modules[name] is head))
    rest = sum(
        part.numel() for name, parts in own.items() for key, part in parts if key != "weight" or name not in linears
    )
    return Layout(
        linears=tuple(linears.values()),
        stack=stack,
        layers=layers,
        heads=head_count(model.config.get_text_config().to_dict()),
        parameters=weights + rest,
        others=frozenset(name for name, parts in own.items() if parts and name not in linears),
        state_spaces=frozenset(name for name, parts in own.items() if any(key == _SKIP for key, _ in parts)),
        tied_head=next((name for name, module in modules.items() if module is head), None) if is_tied else None,
        has_experts=any(EXPERTS.search(name) for name in modules),
    )


def lora_reach(model: Any, targets: Sequence[str] | None = None) -> Reach:
    """Return the part of a model that an adapter of these target modules changes; None: the default modules."""
    return reach(inspect_layout(model), targets)


def _stack(model: Any, modules: Mapping[str, object], linears: Collection[str]) -> tuple[str, int]:
    """Return the path of the language model's list of decoder layers, and their number."""
    decoder = model.get_decoder()
    within = next((name for name, module in modules.items() if module is decoder), "")
    return layer_stack(linears, "" if within in linears else within)  # some models' `decoder` is their head


def _is_linear(module: torch.nn.Module) -> bool:
    """Return True if PEFT can wrap the module; linear routers are excluded, because they return tuples."""
    is_router = "router" in type(module).__name__.lower()
    return isinstance(module, torch.nn.Linear | Conv1D) and not is_router


def _linear(path: str, module: Any) -> Linear:
    if isinstance(module, Conv1D):
        return Linear(path, module.nx, module.nf)
    return Linear(path, module.in_features, module.out_features)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_OTHER_KINDS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")  # not supported


def trainable_model(model: Any, recipe: Recipe) -> Any:
    """Return the model with exactly the recipe's parameters trainable, in float32 at least, in training mode.

    LoRA is initialized from the recipe's seed. Side effect: seeds the global random generator; the caller restores it.
    Raises `UnsupportedModule` for target modules that the model does not have.
    """
    torch.manual_seed(recipe.seed)
    trainable = _widen_(model).requires_grad_(True) if recipe.lora is None else _with_lora(model, recipe.lora, recipe)
    if recipe.gradient_checkpointing:
        # Reentrant checkpointing supports neither `torch.autograd.grad` nor inputs without gradients, as behind frozen
        # embeddings.
        _checkpointing_method(model, "enable")({"use_reentrant": False})
    return trainable.train()


def load_adapter_(model: Any, base: Base, recipe: Recipe, folder: Path) -> str:
    """Load the weights of a LoRA adapter in `folder` into the model; return the SHA-256 of their file.

    Raises `AdapterMismatch` unless the adapter has the recipe's shape and, if it names one, the same base model.
    """
    if recipe.lora is None:
        raise _mismatch("full fine-tuning cannot go on from an adapter")
    try:
        config = json.loads((folder / CONFIG).read_text())
        digest = json.loads(path.read_text()).get("base_digest") if (path := folder / MANIFEST).exists() else None
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _mismatch(f"no LoRA adapter can be read there ({type(error).__name__})") from error
    _check_shape(recipe.lora, sorted(model.peft_config[model.active_adapter].target_modules), config)
    if digest not in (None, base.digest):
        raise _mismatch("the adapter was trained on another base model")
    found: Any = set_peft_model_state_dict(model, tensors)
    absent = [name for name in found.missing_keys if "lora_" in name]
    if absent or found.unexpected_keys:
        raise _mismatch(f"its layers are others: {[*absent, *found.unexpected_keys][0]}")
    return file_sha256(folder / WEIGHTS)


def stop_gradient_checkpointing(model: Any) -> None:
    """Disable the gradient checkpointing that `trainable_model` enabled."""
    _checkpointing_method(model, "disable")()


def dropping_modules(model: Any) -> list[torch.nn.Module]:
    """Return the modules with a positive dropout rate, attention layers that call dropout themselves included.

    The safe losses switch off only these modules: gradient checkpointing needs all others in training mode.
    """
    return [module for module in model.modules() if _rate(module) > 0]


def _widen_(model: Any) -> Any:
    if model.dtype != torch.float64:
        retype_(model, torch.float32)
    return model


def _checkpointing_method(model: Any, what: str) -> Any:
    """Return the model's method under the name of the installed version: transformers 5.23 renamed it."""
    new, old = f"activation_checkpointing_{what}", f"gradient_checkpointing_{what}"
    return getattr(model, new if hasattr(model, new) else old)


def _rate(module: torch.nn.Module) -> float:
    rate = module.p if isinstance(module, torch.nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0


def _check_shape(lora: Lora, targets: list[str], config: dict[str, Any]) -> None:
    """Check that an adapter has the recipe's shape, scale and kind, so that training can continue from it unchanged."""
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}
    for name, value in wanted.items():
        own = sorted(config.get(name) or ()) if name == "target_modules" else config.get(name)
        if own != value:
            raise _mismatch(f"the adapter has {name} {own}, the recipe {value}")
    for name in _OTHER_KINDS:
        if config.get(name):
            raise _mismatch(f"the adapter has {name}, which is not trained here")


def _mismatch(message: str) -> AdapterMismatch:
    return AdapterMismatch(f"start_from: {message}", "start_from")


def _with_lora(model: Any, lora: Lora, recipe: Recipe) -> Any:
    layout = inspect_layout(model)
    targets = _targets(layout, recipe)
    # transformers' Conv1D (GPT-2) stores its weight as [inputs, outputs], which PEFT must know.
    is_transposed = all(isinstance(model.get_submodule(each.path), Conv1D) for each in adapted_layers(layout, targets))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # divided by the rank: a fraction does as well
        lora_dropout=lora.dropout,
        target_modules=list(targets),
        fan_in_fan_out=is_transposed,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with whole_sizes():
        return get_peft_model(model, config)


def _targets(layout: Layout, recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the modules to adapt; raise `UnsupportedModule` for names that do not fit the model."""
    asked = (recipe.lora.target_modules or None) if recipe.lora else None
    why = refusal(layout, asked, has_anchor=recipe.effective_anchor > 0) if asked is not None else None
    targets = () if why else resolved_targets(layout, asked)
    if not targets:
        why = why or "no layer of the model has anything like attention: name the linear layers to adapt"
        raise UnsupportedModule(f"lora.target_modules: {why}", "lora.target_modules")
    return targets
