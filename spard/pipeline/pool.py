"""The safety pool of a run: its rows in their file, how long each is, and its embeddings, worked out once and shared.

Nothing of it is held in memory as a whole, and a second run on the same pool and base model tokenizes no row that it
does not train on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spard.data.chat import UNBOUNDED, encode_all
from spard.data.pool_file import PoolRows, search
from spard.data.rows import Example
from spard.digests import file_sha256
from spard.errors import InvalidPool, raised_as
from spard.pipeline.context import Context

_CHUNK = 2048  # rows between two looks at whether to stop


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool's file by its digest, and the rows of its two sides."""

    digest: str
    safe: Sequence[Example]
    benign: Sequence[Example]


def open_pool(context: Context, path: Path) -> Pool:
    """Find the rows of a pool's file, once for each file; raises `InvalidPool` for a row that breaks a rule."""
    digest = file_sha256(path)
    found_N3 = context.cache.tensor("pools", {"pool": digest}, lambda: _searched(path))
    sides = [found_N3[found_N3[:, 2] == side] for side in (0, 1)]
    return Pool(digest, *(PoolRows(path, _column(side_N3, 0), _column(side_N3, 1)) for side_N3 in sides))


def fitting(context: Context, pool: Pool) -> Sequence[int]:
    """Return the safe rows that have no more tokens than a row may have, in rising order."""
    key: dict[str, Any] = {"base": context.base.digest, "pool": pool.digest}
    length_N = context.cache.tensor("lengths", key, lambda: _lengths(context, pool.safe))
    found: list[int] = (length_N <= context.limit).nonzero().flatten().tolist()
    return range(len(pool.safe)) if len(found) == len(pool.safe) else found


def _column(found_N3: Tensor, number: int) -> array[int]:
    return array("q", found_N3[:, number].contiguous().numpy().tobytes())


def _searched(path: Path) -> Tensor:
    return torch.stack([torch.tensor(column, dtype=torch.int64) for column in search(path)], dim=1)


def _lengths(context: Context, rows: Sequence[Example]) -> Tensor:
    """Count the tokens of each row as it would be trained on."""
    length_N = torch.empty(len(rows), dtype=torch.int32)
    for start in range(0, len(rows), _CHUNK):
        context.go_on()
        with raised_as(InvalidPool):
            encoded = encode_all(context.base.tokenizer, rows[start : start + _CHUNK], UNBOUNDED)
        length_N[start : start + _CHUNK] = torch.tensor([len(row.ids) for row in encoded], dtype=torch.int32)
        context.report.progress(0, len(rows))  # a word that something goes on; nothing is embedded yet
    return length_N
