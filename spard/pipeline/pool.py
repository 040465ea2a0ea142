"""The safety pool of a run: the positions of its rows in their file, and the rows that are too long to train on.

The pool is never in memory as a whole, and only chosen rows are tokenized.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spard.data.chat import UNBOUNDED, encode_all
from spard.data.pool_file import PoolRows, search
from spard.data.rows import Example
from spard.digests import file_sha256
from spard.errors import InvalidPool, convert_errors
from spard.pipeline.context import Context

_CHUNK = 2048  # rows between two checks for a stop


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool file's digest, and the rows of its two sides."""

    digest: str
    safe: Sequence[Example]
    benign: Sequence[Example]


def open_pool(context: Context, path: Path) -> Pool:
    """Locate the rows of a pool file, cached by its digest; raise `InvalidPool` for a row that breaks a rule."""
    digest = file_sha256(path)
    found_N3 = context.cache.tensor("pools", {"pool": digest}, lambda: _find_rows(path))
    sides = [found_N3[found_N3[:, 2] == side] for side in (0, 1)]
    return Pool(digest, *(PoolRows(path, _column(side_N3, 0), _column(side_N3, 1)) for side_N3 in sides))


def too_long(context: Context, pool: Pool, rows: Sequence[int]) -> list[int]:
    """Return the named safe rows that have more tokens than the run's limit; only the named rows are tokenized."""
    found: list[int] = []
    for start in range(0, len(rows), _CHUNK):
        context.raise_if_stopped()
        places = rows[start : start + _CHUNK]
        # An invalid row here is the provider's fault, not the customer's.
        with convert_errors(InvalidPool):
            encoded = encode_all(context.base.tokenizer, [pool.safe[i] for i in places], UNBOUNDED)
        found += [i for i, row in zip(places, encoded, strict=True) if len(row.ids) > context.limit]
        if len(places) < len(rows):
            context.report.progress(0, len(rows))  # a sign of life
    return found


def _column(found_N3: Tensor, number: int) -> array[int]:
    return array("q", found_N3[:, number].contiguous().numpy().tobytes())


def _find_rows(path: Path) -> Tensor:
    return torch.stack([torch.tensor(column, dtype=torch.int64) for column in search(path)], dim=1)
