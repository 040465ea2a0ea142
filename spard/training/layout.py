"""How the tensors of a resume state lie on the ranks: those that belong to a cut parameter are cut as it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spard.losses.vectors import Vector
from spard.models.sharding import Shards

METHOD = "method/"  # tensors that are the method's own; its last word may be the place of a parameter


class Layout:
    """Knows the trained parameters by name and by place."""

    def __init__(self, names: Sequence[str], vector: Vector) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._shards = vector if isinstance(vector, Shards) else None

    @property
    def is_cut(self) -> bool:
        """Whether each rank has parts of the parameters, so that all of them have to save."""
        return self._shards is not None

    def join_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks save together as one; as it is where every rank has all of it."""
        place = self._place(name)
        if self._shards is None or place is None or tensor.shape != self._shards[place].shape:
            return tensor
        return self._shards.join_part(place, tensor)

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor that takes up what this rank needs of a saved one."""
        place = self._place(name)
        if self._shards is None or place is None or shape != self._shards.parameters[place].shape:
            return torch.empty(shape, dtype=dtype)
        return self._shards.join_part(place, torch.empty_like(self._shards[place], dtype=dtype))

    def _place(self, name: str) -> int | None:
        if name.startswith(METHOD):
            last = name.rpartition("/")[2]
            return int(last) if last.isdecimal() and int(last) < len(self._places) else None
        return self._places.get(name.partition("/")[2])
