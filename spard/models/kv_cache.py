"""Key-value caches that a token is written into, where transformers' own copy what they hold for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_ROOM = 32  # tokens


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Keys and values with room for those to come: a token is written beside the others, which are not copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the states (B x H x T x D) of new tokens; return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def join_(self, other: RoomyLayer, width: int) -> None:
        """Add the rows of another layer; both are padded on the left to so many tokens."""
        if self.keys is not None and self.values is not None and other.keys is not None and other.values is not None:
            self.keys = torch.cat([_widen(self.keys, width), _widen(other.keys, width)])
            self.values = torch.cat([_widen(self.values, width), _widen(other.values, width)])

    def _append(self, name: str, held: Tensor | None, new: Tensor) -> Tensor:
        known = held.shape[-2] if held is not None and held.numel() else 0
        width = known + new.shape[-2]
        room = self._rooms.get(name)
        if room is None or held is None or not _is_view(held, room) or width > room.shape[-2]:
            room = new.new_empty(*new.shape[:-2], width + max(_ROOM, width // 4), new.shape[-1])
            if known and held is not None:
                room[..., :known, :] = held
            self._rooms[name] = room
        room[..., known:width, :] = new
        return room[..., :width, :]


def _is_view(held: Tensor, room: Tensor) -> bool:
    """Tell whether states are the beginning of a room, and not a copy of it."""
    return (held.data_ptr(), held.stride()) == (room.data_ptr(), room.stride())


def is_plain(model: Any) -> bool:
    """Tell whether the model's cache is keys and values of every token, and nothing else."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(each) is DynamicLayer for each in layers)


def open_cache(model: Any) -> DynamicCache:
    """Return an empty cache for a model."""
    cache = DynamicCache(config=model.config)
    if is_plain(model):
        cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache


def counts_columns(model: Any) -> bool:
    """Tell whether the model sees how far apart tokens stand in its cache, padding between them too.

    GPT-Neo's local attention and MPT's biases do; others go by the positions that they are told, or by the mask.
    """
    config = model.config.get_text_config()
    has_biases = getattr(getattr(config, "attn_config", None), "alibi", False)
    return bool(has_biases) or "local" in (getattr(config, "attention_layers", None) or ())


def _widen(states_BHTD: Tensor, width: int) -> Tensor:
    return functional.pad(states_BHTD, (0, 0, width - states_BHTD.shape[2], 0))
