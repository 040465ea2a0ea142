r"""SafeLoRA (Hsu et al., 2024): after training, project weight updates onto the directions that alignment changed.

For a weight let V = W_aligned - W_unaligned and C = V V^T / |V|_F. An update D = B A is compared with C D: where
cos(C D, D) is low, the update leaves the aligned subspace and is replaced, D <- C D, by setting B <- C B. C is no
projector: its eigenvalues are sigma^2 / |V|_F, so it also shrinks the update. That is the authors' definition.

The projected weights are those with the `layers` lowest cosines (the authors' default, ties included), or all up to
`threshold`. Weights are matched by module name. In full fine-tuning D = W - W_aligned, for every linear layer but the
output head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from spard.config import SafeLora as SafeLoraSettings
from spard.errors import InvalidModel, InvalidRecipe
from spard.losses.vectors import wide
from spard.methods.base import Method
from spard.models.base import Base, load_base
from spard.models.peft import LoraLayer
from spard.models.sharding import shard_like, whole

log = logging.getLogger(__name__)

_SETTING = "recipe.defense.base_unaligned"


class SafeLora(Method[SafeLoraSettings]):
    """Plain fine-tuning, followed by a projection of the updates."""

    def prepare(self, base: Base, *, has_lora: bool) -> None:
        """Store V = W_aligned - W_unaligned of every trained weight on the CPU; in full fine-tuning W_aligned too.

        Raises `InvalidRecipe` if `base_unaligned` is missing, cannot be loaded, or lacks a weight of the same shape.
        """
        # Loaded before training, so that a missing or unfit model fails early. V stays on the CPU until it is used.
        unaligned = _load(self.settings).model
        weights = _lora_weights(base.model) if has_lora else _linear_weights(base.model)
        self.V = {name: wide(whole(part).cpu() - _twin(unaligned, name, part)) for name, part in weights.items()}
        self.start_of = {} if has_lora else {name: whole(part).cpu().clone() for name, part in weights.items()}

    @torch.no_grad()
    def finish_(self, model: Any) -> None:
        """Project the least aligned updates in place; only one whole weight is on the device at a time."""
        weights = _linear_weights(model) if self.start_of else {}
        layers = {} if self.start_of else _lora_layers(model)
        cosines = dict[str, float]()
        for name in layers or weights:
            update = _update(layers[name]) if layers else self._weight_update(name, weights[name])
            cosines[name] = agreement(update, self.V[name].to(update.device))
        chosen = to_project(cosines, self.settings)
        for name in chosen:
            if name in layers:
                B = _factors(layers[name])[1]
                # C (B A) = (C B) A: changing B alone is enough and keeps the rank.
                B.copy_(project_update(wide(B), self.V[name].to(B.device)))
            else:
                part = weights[name]
                along = project_update(self._weight_update(name, part), self.V[name].to(part.device))
                part.copy_(shard_like(self.start_of[name].to(part.device) + along, part))
        log.info("projected the updates of %d of %d weights", len(chosen), len(cosines))

    def _weight_update(self, name: str, part: Tensor) -> Tensor:
        """Return the update W - W_aligned of a whole weight in full fine-tuning, in float32."""
        return wide(whole(part) - self.start_of[name].to(part.device))


def project_update(update: Tensor, V: Tensor) -> Tensor:
    """Project an update D `[out, in]` onto the alignment V `[out, in]`: V (V^T D) / |V|_F; zeros if V is zero."""
    length = torch.linalg.vector_norm(V)
    # V^T D first: V V^T would be [out, out], while D may be a LoRA factor with few columns.
    return V @ (V.T @ update) / length if length > 0 else torch.zeros_like(update)


def agreement(update: Tensor, V: Tensor) -> float:
    """Return cos(C D, D) of an update; 1 for an update of zeros, which needs no projection."""
    along = project_update(update, V)
    scale = float(torch.linalg.vector_norm(along) * torch.linalg.vector_norm(update))
    if not update.any():
        return 1.0
    return float((along * update).sum()) / scale if scale > 0 else 0.0


def to_project(cosines: Mapping[str, float], cfg: SafeLoraSettings) -> list[str]:
    """Return the names of the weights whose updates are to be projected, chosen by `layers` or else by `threshold`."""
    threshold = cfg.threshold
    if cfg.layers is not None:
        threshold = sorted(cosines.values())[min(cfg.layers, len(cosines)) - 1]
    return [name for name, cosine in cosines.items() if cosine <= threshold]


def _load(cfg: SafeLoraSettings) -> Base:
    if not cfg.base_unaligned:
        raise InvalidRecipe(f"{_SETTING}: name the base model as it was before alignment", _SETTING)
    try:
        return load_base(cfg.base_unaligned, device="cpu")
    except InvalidModel as error:
        raise InvalidRecipe(f"{_SETTING}: {error.message}", _SETTING) from error


def _twin(unaligned: Any, name: str, like: Tensor) -> Tensor:
    """Return the weight of the module of the same name in the unaligned model."""
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
    """Return the factors A and B of the layer's only adapter."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _update(layer: Any) -> Tensor:
    A, B = _factors(layer)
    return wide(B) @ wide(A)
