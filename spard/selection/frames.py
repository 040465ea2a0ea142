"""The frame of embeddings: subtract the pool's mean and remove the few directions that dominate the pool.

The mean states of a language model lie in a narrow cone: they share a large mean and a few directions of large
variance, which say little about the topic of a text (Mu and Viswanath, 2018, "All-but-the-Top"). The frame is fitted
on the pool alone, so it is the same for every customer, and is applied to pool and training rows alike.

For plots, embeddings are projected onto the plane of their two largest directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spard.selection.relevance import blocks, total
from spard.selection.shards import Frame, Framed, Vectors

SAMPLE = 4096  # pool rows that the directions are computed from; the mean is over all rows
DIRECTIONS = 12  # most directions removed from states; see lab/docs/results/embedders.md
_ROWS = 64  # pool rows required per removed direction
_COLUMNS = 16  # embedding width required per removed direction


def in_frame(x_ND: Vectors, frame: Frame) -> Vectors:
    """Return embeddings projected into a frame, in float32; rows that lie in files are projected when they are read."""
    if not isinstance(x_ND, Tensor):
        return Framed(x_ND, frame)
    parts = [frame.project(x_ND[rows]) for rows in blocks(x_ND)]
    return torch.cat(parts) if parts else x_ND.float()


def fit_frame(pool_ND: Vectors, directions: int, seed: int) -> Frame:
    """Fit a frame on a pool: its mean, and the `directions` of largest variance around it, all in float64.

    For a large pool the directions are computed from `SAMPLE` rows, drawn with `seed`. For a small pool or short
    embeddings fewer directions are removed: with few rows, a direction would be a row.
    """
    center_D = total(pool_ND) / max(1, len(pool_ND))
    count = min(directions, len(pool_ND) // _ROWS, pool_ND.shape[1] // _COLUMNS)
    if count <= 0:
        return Frame.from_point(center_D)
    centered_SD = pool_ND[sample_rows(len(pool_ND), SAMPLE, seed)].double() - center_D
    return Frame(center_D, _dominant(centered_SD, count))


def sample_rows(count: int, most: int, seed: int) -> Tensor:
    """Return at most `most` distinct numbers below `count` in rising order; they depend on `seed` alone."""
    if count <= most:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values


def mean_cosine(x_ND: Vectors, seed: int = 0) -> float:
    """Return the mean cosine of two different rows, estimated on a sample of large pools; 0 for fewer than two rows.

    Rows of zeros have cosine 0 with all others.
    """
    x_SD = x_ND[sample_rows(len(x_ND), SAMPLE, seed)].double()
    count = len(x_SD)
    if count < 2:
        return 0.0
    unit_SD: Tensor = torch.nn.functional.normalize(x_SD, dim=1)
    own = float(unit_SD.square().sum())
    return (float(unit_SD.sum(dim=0).square().sum()) - own) / (count * (count - 1))


def _dominant(x_SD: Tensor, count: int) -> Tensor:
    """Return the directions `[K, D]` of largest second moment, from the smaller of the two Gram matrices."""
    if len(x_SD) >= x_SD.shape[1]:
        vectors_DD: Tensor = torch.linalg.eigh(x_SD.T @ x_SD).eigenvectors
        return vectors_DD[:, -count:].T.contiguous()
    rows_SK = torch.linalg.eigh(x_SD @ x_SD.T).eigenvectors[:, -count:]
    directions_KD: Tensor = torch.linalg.qr((rows_SK.T @ x_SD).T).Q.T.contiguous()
    return directions_KD


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
