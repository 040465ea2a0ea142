"""Embeddings in several parts; parts that are too large for memory are read from files, a block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor


class Shards:
    """The rows of several tensors of one width, numbered across them; memory-mapped tensors stay in their files."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Combine the parts in order; at least one is required."""
        self._parts = list(parts)
        self._starts = list(accumulate((len(part) for part in parts), initial=0))
        self.dtype, self.device = parts[0].dtype, parts[0].device
        self.shape = torch.Size((self._starts[-1], parts[0].shape[1]))

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._starts[-1]

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        """Return the rows of a slice without a step, or those at the indices, in their order."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return self._run(start, max(start, stop))
        index_B = torch.as_tensor(rows, dtype=torch.int64)
        found_BD = torch.empty(len(index_B), self.shape[1], dtype=self.dtype, device=self.device)
        for part, (start, stop) in zip(self._parts, pairwise(self._starts), strict=True):
            places = ((index_B >= start) & (index_B < stop)).nonzero().flatten()
            if len(places):
                found_BD[places] = part[index_B[places] - start]
        return found_BD

    def whole(self) -> Tensor:
        """Return all rows as one tensor: the only part as it is, or a copy."""
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)

    def _run(self, start: int, stop: int) -> Tensor:
        """Return consecutive rows: a view if they lie in one part, else a copy."""
        pieces = [
            part[max(start - a, 0) : stop - a]
            for part, (a, b) in zip(self._parts, pairwise(self._starts), strict=True)
            if a < stop and start < b
        ]
        if not pieces:
            return self._parts[0][:0]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class Frame:
    """A point to subtract and orthonormal directions `[K, D]` to remove, both in float64."""

    center_D: Tensor
    removed_KD: Tensor

    @classmethod
    def from_point(cls, center_D: Tensor) -> Frame:
        """Return a frame that subtracts this point and removes no direction."""
        return cls(center_D, center_D.new_zeros(0, len(center_D)))

    @classmethod
    def from_tensor(cls, rows: Tensor) -> Frame:
        """Return the frame from the tensor that `to_tensor` returned."""
        return cls(rows[0], rows[1:])

    def to_tensor(self) -> Tensor:
        """Return the frame as one tensor `[1 + K, D]` to store in a file: the point, then the directions."""
        return torch.cat([self.center_D.unsqueeze(0), self.removed_KD])

    def project(self, x_BD: Tensor) -> Tensor:
        """Return rows in this frame, in float32.

        Each row is computed on its own, so that equal rows stay exactly equal in any batch.
        """
        y_BD = x_BD.double() - self.center_D.to(x_BD.device)
        for direction_D in self.removed_KD.to(x_BD.device):
            y_BD -= (y_BD * direction_D).sum(dim=1, keepdim=True) * direction_D
        return y_BD.float()


class FramedVectors:
    """Embeddings in a frame; each row is projected when it is read."""

    def __init__(self, vectors: Vectors, frame: Frame) -> None:
        """Wrap embeddings that are not projected yet."""
        self._vectors, self._frame, self.dtype = vectors, frame, torch.float32
        self.device: torch.device = vectors.device
        self.shape: torch.Size = vectors.shape

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._vectors)

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        """Return projected rows, indexed as in `Shards`."""
        return self.project(self._vectors[rows])

    def project(self, x_BD: Tensor) -> Tensor:
        """Return rows of the wrapped embeddings projected into the frame."""
        return self._frame.project(x_BD)


Vectors: TypeAlias = Tensor | Shards | FramedVectors


def whole(vectors: Vectors) -> Tensor:
    """Return all embeddings as one tensor in memory."""
    return vectors.whole() if isinstance(vectors, Shards) else vectors[:]
