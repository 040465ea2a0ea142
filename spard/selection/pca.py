"""Projection of embeddings onto a plane, for plots."""

from __future__ import annotations

import torch
from torch import Tensor


def coordinates(x_KD: Tensor) -> list[tuple[float, float]]:
    """Return each row's first two principal components, rounded to six digits."""
    return [(round(x, 6), round(y, 6)) for x, y in principal_plane(x_KD).tolist()]


def principal_plane(x_KD: Tensor) -> Tensor:
    """Return the first two principal components of each row, `[K, 2]`, in float64.

    The sign of a component is arbitrary; here the entry of largest size is positive.
    """
    centered_KD = x_KD.double() - x_KD.double().mean(dim=0)
    U_KR, size_R, _ = torch.linalg.svd(centered_KD, full_matrices=False)
    axes_KR = (U_KR * size_R)[:, :2]
    largest = axes_KR.gather(0, axes_KR.abs().argmax(dim=0, keepdim=True))
    axes_KR = axes_KR * torch.where(largest < 0, -1.0, 1.0)
    return torch.nn.functional.pad(axes_KR, (0, 2 - axes_KR.shape[1]))  # a single row has one axis
