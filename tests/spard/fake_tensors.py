"""What PyTorch itself saves for the backward pass of a model that this machine could never hold, on fake tensors.

A fake tensor has a shape, a type and a device, and no numbers (`torch._subclasses.FakeTensorMode`).
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from spard.config import Recipe
from spard.models.lora import trainable_model


def saved_bytes(config: Any, recipe: Recipe, rows: int, tokens: int, layers: int) -> int:
    """The bytes that `layers` layers save, told from depths 1 and 2: what one more layer adds, times the layers."""
    one, two = (_saved_bytes(config, recipe, rows, tokens, depth) for depth in (1, 2))
    return one + (layers - 1) * (two - one)


def _saved_bytes(config: Any, recipe: Recipe, rows: int, tokens: int, depth: int) -> int:
    config.num_hidden_layers = depth
    with torch.device("meta"):
        model = trainable_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), recipe)
    with FakeTensorMode():
        own = {_storage(part) for part in _as_fake(model)}
        found: dict[int, int] = {}
        kept = []

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in own | found.keys():
                found[_storage(tensor)] = tensor.untyped_storage().nbytes()
                kept.append(tensor)
            return tensor

        decoder = model.get_base_model().get_decoder() if recipe.lora else model.get_decoder()
        # Rows without padding need no mask; on fake tensors transformers makes one, since it cannot look.
        mask = patch.object(__import__(type(decoder).__module__, fromlist=["x"]), "create_causal_mask", _no_mask)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with mask, hooks, torch.autocast("cpu", torch.bfloat16):
            decoder(input_ids=torch.zeros(rows, tokens, dtype=torch.int64), use_cache=False)
    return sum(found.values())


def _as_fake(model: torch.nn.Module) -> list[Tensor]:
    """Replace the parameters and buffers of a model on the device `meta` by fake ones on the CPU."""
    for module in model.modules():
        for name, part in module._parameters.items():
            if part is not None:
                fake = torch.empty(part.shape, dtype=part.dtype)
                module._parameters[name] = torch.nn.Parameter(fake, requires_grad=part.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return [*model.parameters(), *model.buffers()]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
