"""Key-value caches that append tokens in place; transformers' own caches copy everything for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_ROOM = 32  # tokens of spare capacity


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Keys and values with spare capacity: new tokens are written in place instead of copying the old ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the states `[B, H, T, D]` of new tokens; return the states of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def join_(self, other: RoomyLayer, width: int) -> None:
        """Append the rows of another layer; both are padded on the left to `width` tokens."""
        if self.keys is not None and self.values is not None and other.keys is not None and other.values is not None:
            self.keys = torch.cat([_widen(self.keys, width), _widen(other.keys, width)])
            self.values = torch.cat([_widen(self.values, width), _widen(other.values, width)])

    def _append(self, name: str, held: Tensor | None, new: Tensor) -> Tensor:
        known = held.shape[-2] if held is not None and held.numel() else 0
        width = known + new.shape[-2]
        room = self._rooms.get(name)
        # Reordering or repeating a cache replaces `keys` by a copy outside of the buffer; a new buffer is needed then.
        if room is None or held is None or not _is_view(held, room) or width > room.shape[-2]:
            room = new.new_empty(*new.shape[:-2], width + max(_ROOM, width // 4), new.shape[-1])
            if known and held is not None:
                room[..., :known, :] = held
            self._rooms[name] = room
        room[..., known:width, :] = new
        return room[..., :width, :]


def _is_view(held: Tensor, room: Tensor) -> bool:
    """Return True if the states are the beginning of the buffer, not a copy."""
    return (held.data_ptr(), held.stride()) == (room.data_ptr(), room.stride())


def is_plain(model: Any) -> bool:
    """Return True if the model's cache holds only the keys and values of every token."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(type(each) is DynamicLayer for each in layers)


def open_cache(model: Any) -> DynamicCache:
    """Return an empty cache for the model, with in-place layers if its cache is plain."""
    cache = DynamicCache(config=model.config)
    if is_plain(model):
        cache.layers = [RoomyLayer() for _ in cache.layers]
    return cache


def counts_columns(model: Any) -> bool:
    """Return True if the model measures distances between cache columns, including padding.

    GPT-Neo's local attention and MPT's ALiBi biases do; other models use position ids or the mask.
    """
    config = model.config.get_text_config()
    has_biases = getattr(getattr(config, "attn_config", None), "alibi", False)
    return bool(has_biases) or "local" in (getattr(config, "attention_layers", None) or ())


def _widen(states_BHTD: Tensor, width: int) -> Tensor:
    return functional.pad(states_BHTD, (0, 0, width - states_BHTD.shape[2], 0))
