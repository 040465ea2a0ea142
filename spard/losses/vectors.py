"""Arithmetic on parameter vectors: a vector is the list of its tensors, and sums are taken in float32 at least.

If the tensors are sharded over ranks (`spard.models.sharding`), every sum here is over the shards of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from spard import distributed

Vector: TypeAlias = Sequence[Tensor]


@torch.no_grad()
def dot(x: Vector, y: Vector) -> float:
    """Return the inner product <x, y>."""
    return float(inner(x, y))


@torch.no_grad()
def inner(x: Vector, y: Vector) -> Tensor:
    """Return the inner product <x, y> as a scalar tensor, without waiting for the device."""
    # `_foreach` functions launch one kernel for many tensors; an adapter has hundreds of small ones.
    products = torch._foreach_mul(_wide(x), _wide(y))
    return distributed.over_parts(torch.stack([product.sum() for product in products]).sum())


@torch.no_grad()
def norm(x: Vector) -> Tensor:
    """Return the Euclidean norm |x| as a scalar tensor, without waiting for the device."""
    length: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(_wide(x))))
    return distributed.over_parts(length.square()).sqrt() if distributed.are_parts() else length


@torch.no_grad()
def norms(x: Vector) -> Tensor:
    """Return the norm of each tensor of `x`, without waiting for the device."""
    lengths = torch.stack(torch._foreach_norm(list(x)))
    return distributed.over_parts(lengths.square()).sqrt() if distributed.are_parts() else lengths


@torch.no_grad()
def add_(x: Vector, y: Vector, scale: float = 1.0) -> None:
    """Add in place: x <- x + scale y."""
    torch._foreach_add_(list(x), [part.to(like.dtype) for part, like in zip(y, x, strict=True)], alpha=scale)


@torch.no_grad()
def scale_(x: Vector, factor: Tensor | float) -> None:
    """Scale in place: x <- factor x."""
    torch._foreach_mul_(list(x), factor)


def size(x: Vector) -> int:
    """Return N, the number of coordinates."""
    own = sum(math.prod(part.shape) for part in x)
    return int(distributed.over_parts(torch.tensor(own, device=x[0].device))) if distributed.are_parts() else own


def total(x: Vector) -> Tensor:
    """Return the sum of all coordinates in float64, as a scalar tensor; tensors are added one after the other."""
    return distributed.over_parts(torch.stack([part.sum().double() for part in x]).cumsum(dim=0)[-1].clone())


@torch.no_grad()
def shorten_(x: Vector, most: float | Tensor) -> Tensor:
    """Shorten a vector in place to norm `most`, if it is longer; return its norm before, as a scalar tensor."""
    length = norm(x)
    limit = most.to(length.dtype) if isinstance(most, Tensor) else most
    # The formula of `torch.nn.utils.clip_grad_norm_`; without a branch the CPU need not wait for the GPU.
    scale_(x, ((length + 1e-6).reciprocal() * limit).clamp(max=1.0))
    return length


def wide(part: Tensor) -> Tensor:
    """Return a float64 tensor as it is, and any other in float32."""
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


def _wide(x: Vector) -> list[Tensor]:
    return [wide(part) for part in x]
