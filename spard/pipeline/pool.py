"""The safety pool of a run: the positions of its rows in their file, and the rows that are too long to train on.

The pool is never in memory as a whole, and only chosen rows are tokenized.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from spard.data.chat import UNBOUNDED, encode_all
from spard.data.jsonl import UTF8_BOM, BadRow, decode_line, file_chunks, parse_row, placed_rows, raise_first_error
from spard.data.row_rules import is_benign, pool_row
from spard.data.rows import Example, pool_example
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
    context.report.activity("reading the safety pool")
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
        context.report.activity(f"counting the tokens of {len(rows):,} safe rows", start, len(rows))
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


# A pool that stays in its file: only the offset of each row is in memory, and a row is read on access.

_READ = 2048  # rows per read when iterating


class PoolRows(Sequence[Example]):
    """One side of a pool file (the safe or the benign rows), in file order.

    `starts` are the byte offsets of the rows' lines, `lines` their line numbers from 1.
    """

    def __init__(self, path: Path, starts: array[int], lines: array[int]) -> None:
        """Take the file with the offsets found by `search`; the file must not change afterward."""
        self._path, self._starts, self._lines = path, starts, lines

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts)

    @overload
    def __getitem__(self, rows: int) -> Example: ...
    @overload
    def __getitem__(self, rows: slice) -> list[Example]: ...
    def __getitem__(self, rows: int | slice) -> Example | list[Example]:
        """Read one row, or the rows of a slice."""
        if isinstance(rows, slice):
            return list(self._read(range(len(self))[rows]))
        return next(self._read([range(len(self))[rows]]))

    def __iter__(self) -> Iterator[Example]:
        """Read all rows, a few at a time."""
        for start in range(0, len(self), _READ):
            yield from self[start : start + _READ]

    def _read(self, places: Sequence[int]) -> Iterator[Example]:
        with self._path.open("rb") as file:
            for i in places:
                start, line = self._starts[i], self._lines[i]
                file.seek(start)
                raw = file.readline().removesuffix(b"\n")
                yield pool_example(
                    parse_row(decode_line(raw if start else raw.removeprefix(UTF8_BOM), line), line), line
                )


def search(path: Path) -> tuple[array[int], array[int], array[int]]:
    """Return for each row of a pool file: byte offset, line number, and whether it is benign (0 or 1).

    Raises `InvalidPool` for the first row that breaks a rule.
    """
    starts, lines, benign = array("q"), array("q"), array("q")
    try:
        for start, line, row in placed_rows(file_chunks(path)):
            raise_first_error(pool_row(row, line), InvalidPool)
            for column, value in zip((starts, lines, benign), (start, line, is_benign(row)), strict=True):
                column.append(value)
    except BadRow as bad:
        raise_first_error([bad.problem], InvalidPool)
    return starts, lines, benign
