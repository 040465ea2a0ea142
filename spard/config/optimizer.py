"""The setting of how the optimizer stores its moments. Imports the standard library only."""

from __future__ import annotations

from typing import Literal, TypeAlias

from spard.errors import InvalidRecipe

OptimizerName: TypeAlias = Literal["adamw", "adamw_8bit"]
"""adamw: two moments in float32 per trained parameter; adamw_8bit: two moments in 8 bits, by bitsandbytes."""

_PARAM = "recipe.optimizer"


def check_optimizer(optimizer: OptimizerName, *, has_lora: bool, is_sharded: bool) -> None:
    """Raise `InvalidRecipe` if moments in 8 bits are unsupported in this run or save nothing."""
    if optimizer == "adamw":
        return
    if has_lora:
        message = f"{_PARAM}: {optimizer} saves memory in full fine-tuning; an adapter's moments are few, set adamw"
        raise InvalidRecipe(message, _PARAM)
    if is_sharded:
        message = f"{_PARAM}: the moments of {optimizer} are not cut over GPUs; set sharding = none"
        raise InvalidRecipe(message, _PARAM)
