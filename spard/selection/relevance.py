"""Relevance of pool rows to a task: the largest cosine with a task row, exact and in blocks, in the pool's frame.

Float32 products find the nearest task row, and its cosine is then computed in float64, because a power of the relevance
amplifies rounding errors.

The frame of embeddings subtracts the pool's mean and removes the few directions that dominate the pool. The mean states
of a language model lie in a narrow cone: they share a large mean and a few directions of large variance, which say
little about the topic of a text (Mu and Viswanath, 2018, "All-but-the-Top"). The frame is fitted on the pool alone, so
it is the same for every customer, and is applied to pool and training rows alike. For plots, embeddings are projected
onto the plane of their two largest directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spard.errors import InvalidData
from spard.selection.shards import Frame, FramedVectors, Vectors

BLOCK = 2**21  # elements of one block: 8 MB in float32
_ROWS, _COLUMNS = 1024, 2048  # rows and columns of one matrix product
LONGEST = 1e30  # up to this length a norm and its inverse are safe in float32


def quality(pool_ND: Vectors, task_MD: Vectors, beta: float = 1.0) -> Tensor:
    """Return the relevance of each pool row, [max_z cos(x, z)]_+^beta, `[N]` in float64.

    0 if there are no task rows.
    """
    return relevance(pool_ND, task_MD)[0].pow(beta)


def relevance(pool_ND: Vectors, task_MD: Vectors) -> tuple[Tensor, Tensor]:
    """Return each pool row's `quality` before the power, and the index of its nearest task row, `[N]` each.

    The side with more rows is read once, a block at a time; a normalized copy of the other one is held in memory.
    """
    if len(pool_ND) >= len(task_MD):
        to_task = ToTask(pool_ND, task_MD)
        read(pool_ND, to_task.see)
        return to_task.result()
    nearest = Nearest(pool_ND)
    read(task_MD, nearest.see)
    return nearest.result(task_MD)


def read(x_ND: Vectors, *readers: Callable[[slice, Tensor], None]) -> None:
    """Pass all rows to each reader, one block at a time, reading every block once."""
    for rows in blocks(x_ND, _ROWS):
        x_BD = x_ND[rows]
        for see in readers:
            see(rows, x_BD)


def total(x_ND: Vectors) -> Tensor:
    """Return the sum of all rows in float64."""
    return torch.stack([x_ND[rows].double().sum(dim=0) for rows in blocks(x_ND)]).sum(dim=0)


def inverse_norms(x_ND: Vectors) -> Tensor:
    """Return 1/|x| of each row in float64; 0 for a row of zeros.

    Raises `InvalidData` if an embedding is not finite or longer than `LONGEST`.
    """
    norm_N = torch.empty(len(x_ND), dtype=torch.float64, device=x_ND.device)
    for rows in blocks(x_ND):
        norm_N[rows] = torch.linalg.vector_norm(x_ND[rows], dim=1, dtype=torch.float64)
    # Written so that NaN fails it too.
    if not bool((norm_N < LONGEST).all()):
        raise InvalidData("An embedding is not finite; the base model cannot embed this text.")
    return torch.where(norm_N > 1 / LONGEST, 1 / norm_N, 0.0)


def product_dtype(x_ND: Vectors) -> torch.dtype:
    """Return float32 for products; float64 if the input is float64 or the process allows TF32 or bfloat16 products."""
    whole = torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if whole and x_ND.dtype != torch.float64 else torch.float64


def blocks(x_ND: Vectors, most: int = BLOCK) -> Iterator[slice]:
    """Yield consecutive slices over the N rows; each has at most `most` rows and `BLOCK` elements, or a single row."""
    size = max(1, min(most, BLOCK // max(1, x_ND.shape[1])))
    return (slice(start, min(start + size, len(x_ND))) for start in range(0, len(x_ND), size))


class ToTask:
    """Compute the relevance of pool rows that are read in blocks; the task rows are in memory."""

    def __init__(self, pool_ND: Vectors, task_MD: Vectors) -> None:
        """Normalize the task rows; the pool is not read, only its length and dtype."""
        self._task_MD, self._dtype = task_MD, product_dtype(pool_ND)
        self._columns = [
            (rows.start, _normalized_columns(task_MD[rows], self._dtype)) for rows in blocks(task_MD, _COLUMNS)
        ]
        self._inverse_M = inverse_norms(task_MD)
        self._cosine_N = torch.zeros(len(pool_ND), dtype=torch.float64, device=pool_ND.device)
        self._nearest_N = torch.zeros(len(pool_ND), dtype=torch.int64, device=pool_ND.device)

    def see(self, rows: slice, x_BD: Tensor) -> None:
        """Compute the relevance of a block of pool rows."""
        inverse_B = inverse_norms(x_BD)
        if not self._columns:
            return
        best = _Best(len(x_BD), x_BD.device, self._dtype)
        for start, z_DM in self._columns:
            best.see(slice(None), x_BD.to(self._dtype), z_DM, start)
        # Only the row's nearest task row is computed again in float64.
        z = self._nearest_N[rows] = best.place_B
        self._cosine_N[rows] = _dots(x_BD, self._task_MD[z]) * inverse_B * self._inverse_M[z]

    def result(self) -> tuple[Tensor, Tensor]:
        """Return relevance and nearest task row, as `relevance` does, after all rows were read."""
        return self._cosine_N.clamp(0, 1), self._nearest_N


class Nearest:
    """Find for each row in memory the nearest of the task rows, which are many and are read in blocks."""

    def __init__(self, own_ND: Vectors) -> None:
        """Compute the norms of the rows in memory; the task rows are not read yet."""
        self._own_ND, self._dtype = own_ND, product_dtype(own_ND)
        self._inverse_N = inverse_norms(own_ND)
        self._best = _Best(len(own_ND), own_ND.device, self._dtype)

    def see(self, columns: slice, z_BD: Tensor) -> None:
        """Compare a block of the task rows with all rows in memory."""
        z_DB = _normalized_columns(z_BD, self._dtype)
        for rows in blocks(self._own_ND, _ROWS):
            self._best.see(rows, self._own_ND[rows].to(self._dtype), z_DB, columns.start)

    def result(self, task_MD: Vectors) -> tuple[Tensor, Tensor]:
        """Return relevance and nearest task row, as `relevance` does, after all rows were read.

        Only the nearest rows are read again.
        """
        cosine_N = torch.zeros_like(self._inverse_N)
        for rows in blocks(self._own_ND, _ROWS):
            z_BD = task_MD[self._best.place_B[rows]]
            cosine_N[rows] = _dots(self._own_ND[rows], z_BD) * self._inverse_N[rows] * inverse_norms(z_BD)
        return cosine_N.clamp(0, 1), self._best.place_B


class _Best:
    """For each row, the column with the largest product; the columns come in blocks."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype) -> None:
        self._best_B = torch.full((count,), -torch.inf, dtype=dtype, device=device)
        self.place_B = torch.zeros(count, dtype=torch.int64, device=device)

    def see(self, rows: slice, x_BD: Tensor, z_DM: Tensor, start: int) -> None:
        """Compare the products of some rows with a block of columns, the first of which has the number `start`."""
        value_B, place_B = (x_BD @ z_DM).max(dim=1)
        better_B = value_B > self._best_B[rows]
        self._best_B[rows] = value_B.where(better_B, self._best_B[rows])
        self.place_B[rows] = (place_B + start).where(better_B, self.place_B[rows])


def _dots(x_BD: Tensor, z_BD: Tensor) -> Tensor:
    return (x_BD.double() * z_BD.double()).sum(dim=1)


def _normalized_columns(z_MD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return normalized rows as columns, `[D, M]`."""
    return (z_MD.double() * inverse_norms(z_MD).unsqueeze(1)).to(dtype).T


SAMPLE = 4096  # pool rows that the directions are computed from; the mean is over all rows
DIRECTIONS = 12  # most directions removed from states; see lab/docs/results/embedders.md
_ROWS_EACH = 64  # pool rows required per removed direction
_COLUMNS_EACH = 16  # embedding width required per removed direction


def in_frame(x_ND: Vectors, frame: Frame) -> Vectors:
    """Return embeddings projected into a frame, in float32; rows that lie in files are projected when they are read."""
    if not isinstance(x_ND, Tensor):
        return FramedVectors(x_ND, frame)
    parts = [frame.project(x_ND[rows]) for rows in blocks(x_ND)]
    return torch.cat(parts) if parts else x_ND.float()


def fit_frame(pool_ND: Vectors, directions: int, seed: int) -> Frame:
    """Fit a frame on a pool: its mean, and the `directions` of largest variance around it, all in float64.

    For a large pool the directions are computed from `SAMPLE` rows, drawn with `seed`. For a small pool or short
    embeddings fewer directions are removed: with few rows, a direction would be a row.
    """
    center_D = total(pool_ND) / max(1, len(pool_ND))
    count = min(directions, len(pool_ND) // _ROWS_EACH, pool_ND.shape[1] // _COLUMNS_EACH)
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
