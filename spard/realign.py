"""SafeLoRA on a model: what alignment once changed in each weight, and the projection after training."""

from __future__ import annotations

import logging
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import Linear

from spard.config import SafeLora
from spard.errors import InvalidModel, InvalidRecipe
from spard.methods.safelora import agreement, projected, to_project
from spard.models import Base, load_base

log = logging.getLogger(__name__)

_SETTING = "recipe.defense.base_unaligned"


class Realignment:
    """V = W_aligned - W_unaligned of every weight that is trained, kept on the CPU while training goes on."""

    def __init__(self, base: Base, cfg: SafeLora, *, has_lora: bool) -> None:
        self.cfg = cfg
        unaligned = _load(cfg).model
        weights = _lora_weights(base.model) if has_lora else _linear_weights(base.model)
        self.V = {name: (part.cpu() - _twin(unaligned, name, part)).float() for name, part in weights.items()}
        self.start = {} if has_lora else {name: part.cpu().clone() for name, part in weights.items()}

    @torch.no_grad()
    def finish_(self, model: Any) -> None:
        """Project the updates that left the aligned subspace most."""
        weights = _linear_weights(model) if self.start else {}
        layers = {} if self.start else _lora_layers(model)
        updates = {name: _update(layer) for name, layer in layers.items()} or {
            name: (part - self.start[name].to(part.device)).float() for name, part in weights.items()
        }
        V = {name: part.to(updates[name].device) for name, part in self.V.items()}
        chosen = to_project({name: agreement(update, V[name]) for name, update in updates.items()}, self.cfg)
        for name in chosen:
            if name in layers:
                B = _factors(layers[name])[1]
                B.copy_(projected(B.float(), V[name]))
            else:
                start = self.start[name].to(weights[name].device)
                weights[name].copy_(start + projected(updates[name], V[name]))
        log.info("projected the updates of %d of %d weights", len(chosen), len(updates))


def _load(cfg: SafeLora) -> Base:
    if not cfg.base_unaligned:
        raise InvalidRecipe(f"{_SETTING}: name the base model as it was before alignment", _SETTING)
    try:
        return load_base(cfg.base_unaligned, device="cpu")
    except InvalidModel as error:
        raise InvalidRecipe(f"{_SETTING}: {error.message}", _SETTING) from error


def _twin(unaligned: Any, name: str, like: Tensor) -> Tensor:
    """The weight of the same module in the model before alignment."""
    modules = dict(unaligned.named_modules())
    if name not in modules or modules[name].weight.shape != like.shape:
        raise InvalidRecipe(f"{_SETTING}: it has no weight {name} of shape {list(like.shape)}", _SETTING)
    weight: Tensor = modules[name].weight.detach().to(like.dtype)
    return weight


def _lora_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _lora_weights(model: Any) -> dict[str, Tensor]:
    layers = _lora_layers(model).items()
    return {name: layer.get_base_layer().weight.detach() for name, layer in layers}


def _linear_weights(model: Any) -> dict[str, Tensor]:
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    return {name: module.weight.detach() for name, module in linear.items() if module is not head}


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """A and B of the one adapter."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _update(layer: Any) -> Tensor:
    A, B = _factors(layer)
    return B.float() @ A.float()
