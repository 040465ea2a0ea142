"""The layout of a resume state's tensors on ranks: a tensor of a sharded parameter is sharded in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spard.losses.vectors import Vector
from spard.models.sharding import Shards

METHOD = "method/"  # prefix of the method's tensors; the last part of a name may be a parameter's index


class Layout:
    """The trained parameters by name and index, and their shards if there are any."""

    def __init__(self, names: Sequence[str], vector: Vector) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._shards = vector if isinstance(vector, Shards) else None

    @property
    def is_cut(self) -> bool:
        """True if the parameters are sharded over ranks, so that all ranks have to save."""
        return self._shards is not None

    def join_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as a distributed one that all ranks save together; unchanged if every rank has all of it."""
        place = self._place(name)
        if self._shards is None or place is None or tensor.shape != self._shards[place].shape:
            return tensor
        return self._shards.join_part(place, tensor)

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an empty tensor for loading: of the saved shape, or distributed if the parameter is sharded."""
        place = self._place(name)
        if self._shards is None or place is None or shape != self._shards.parameters[place].shape:
            return torch.empty(shape, dtype=dtype)
        return self._shards.join_part(place, torch.empty_like(self._shards[place], dtype=dtype))

    def _place(self, name: str) -> int | None:
        if name.startswith(METHOD):
            last = name.rpartition("/")[2]
            return int(last) if last.isdecimal() and int(last) < len(self._places) else None
        return self._places.get(name.partition("/")[2])
