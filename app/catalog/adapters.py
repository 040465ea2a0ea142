"""Check which modules of a base model LoRA adapters can change, from its files alone, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from app.db.tables import BaseModelEntry
from app.db.tables.catalog import LoraReachJson
from app.errors import InvalidRequest
from spard.config import Lora, Recipe
from spard.models.stored import read_layout
from spard.models.targets import reach, refusal


def adapter_reach(source: str, targets: Sequence[str] | None) -> LoraReachJson | None:
    """Return the layers and the share of a model's parameters that adapters with these target modules cover.

    `targets` None means the default modules. Returns None if the model's weights are not on this machine. Raises
    `InvalidRequest` for modules that cannot be adapted.
    """
    _require_adaptable(source, targets, has_anchor=True, param="target_modules")
    layout = read_layout(source)
    found = reach(layout, targets) if layout else None
    if found is None or not found.target_modules:
        return None
    return {
        "target_modules": list(found.target_modules),
        "layers": found.layers,
        "of_layers": found.of_layers,
        "share": found.share,
        "leaves_out_experts": found.leaves_out_experts,
    }


def with_default(lora: Lora, model: BaseModelEntry) -> Lora:
    """Return LoRA settings with the base model's own target modules filled in, if they name none."""
    if lora.target_modules or model.target_modules is None:
        return lora
    return Lora(lora.rank, lora.alpha, lora.dropout, tuple(model.target_modules))


def check_recipe(recipe: Recipe, model: BaseModelEntry) -> None:
    """Raise `InvalidRequest` if a recipe's target modules do not exist in the model or cannot be adapted."""
    targets = recipe.lora.target_modules if recipe.lora else None
    has_anchor = recipe.effective_anchor > 0
    _require_adaptable(model.source, targets, has_anchor=has_anchor, param="lora.target_modules")


def _require_adaptable(source: str, targets: Sequence[str] | None, *, has_anchor: bool, param: str) -> None:
    """Raise `InvalidRequest`, with the reason, for target modules that cannot be adapted.

    A model that is not on this machine is not checked; its job will fail by itself.
    """
    layout = read_layout(source) if targets else None
    why = refusal(layout, targets, has_anchor=has_anchor) if layout and targets else None
    if why:
        raise InvalidRequest(f"{param}: {why}.", code="unsupported_module", param=param)
