"""Reads the layout of a loaded model: its linear layers by path, from which `spard.models.targets` chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from spard.models.linears import EXPERTS, Layout, Linear, head_count, layer_stack
from spard.models.targets import Reach, reach

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
