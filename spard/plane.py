"""Embeddings as points of a plane, to be looked at."""

from __future__ import annotations

import torch
from torch import Tensor


def coordinates(x_KD: Tensor) -> list[tuple[float, float]]:
    """The first two principal components of the rows, by the eigenvectors of their K x K inner products.

    Which way an axis points is free: here the entry of largest size is positive.
    """
    centred_KD = x_KD.double() - x_KD.double().mean(dim=0)
    values, vectors_KK = torch.linalg.eigh(centred_KD @ centred_KD.T)
    axes_K2 = vectors_KK[:, -2:].flip(1) * values[-2:].flip(0).clamp(min=0).sqrt()
    largest = axes_K2.gather(0, axes_K2.abs().argmax(dim=0, keepdim=True))
    axes_K2 = axes_K2 * torch.where(largest < 0, -1.0, 1.0)
    padded = torch.nn.functional.pad(axes_K2, (0, 2 - axes_K2.shape[1]))  # a single row has one axis
    return [(round(x, 6), round(y, 6)) for x, y in padded.tolist()]
