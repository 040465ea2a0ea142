"""The optimizer of a run, and its state per trained parameter for resume states.

`adamw_8bit` is AdamW of bitsandbytes, which holds both moments in 8 bits with one scale per block of 256 numbers
(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022). Parameters of fewer than 4,096 numbers keep
theirs in float32. bitsandbytes is imported only for this optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from spard.config import Recipe
from spard.errors import InvalidRecipe

_FLOAT32 = ("step", "exp_avg", "exp_avg_sq")
_8BIT = ("state1", "state2", "absmax1", "absmax2")


def require(recipe: Recipe) -> None:
    """Raise `InvalidRecipe` if the recipe's optimizer is not installed."""
    if recipe.optimizer == "adamw_8bit" and find_spec("bitsandbytes") is None:
        message = "recipe.optimizer: adamw_8bit needs bitsandbytes: pip install 'spard[nf4]'; or set adamw"
        raise InvalidRecipe(message, "recipe.optimizer")


def open_optimizer(recipe: Recipe, parameters: Iterable[Tensor], rate: float) -> Optimizer:
    """Return the recipe's optimizer at learning rate `rate`.

    Raises `InvalidRecipe` if it is not installed.
    """
    require(recipe)
    if recipe.optimizer == "adamw":
        return AdamW(parameters, lr=rate, weight_decay=recipe.weight_decay, fused=True)
    in_8_bits: Any = import_module("bitsandbytes.optim").AdamW8bit
    made: Optimizer = in_8_bits(list(parameters), lr=rate, weight_decay=recipe.weight_decay)
    return made


def parameter_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's tensors of one parameter by name.

    The lookup tables of 8-bit numbers are constant and left out.
    """
    state = optimizer.state[parameter]
    if not _is_8bit(optimizer):
        return dict(state)
    kept = {name: state[name] for name in _8BIT if name in state}
    return kept | ({"step": torch.tensor(state["step"])} if kept else {})


def restore_(optimizer: Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Restore the optimizer's state of each parameter; `saved` has the names `{state}/{parameter}`."""
    for place, (name, parameter) in enumerate(parameters.items()):
        if _is_8bit(optimizer):
            _restore_8bit_(optimizer, place, name, parameter, saved)
        else:
            moments = {key: saved[f"{key}/{name}"] for key in _FLOAT32}
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in moments.items()}


def _restore_8bit_(optimizer: Any, place: int, name: str, parameter: Tensor, saved: Mapping[str, Tensor]) -> None:
    """Create an empty state as the first step does, then fill it."""
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, place)
    state = optimizer.state[parameter]
    for key in _8BIT:
        if key in state:
            state[key].copy_(saved[f"{key}/{name}"])
    state["step"] = int(saved[f"step/{name}"])


def _is_8bit(optimizer: Optimizer) -> bool:
    return not isinstance(optimizer, AdamW)
