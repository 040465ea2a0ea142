"""A pool that stays in its file: only the offset of each row is in memory, and a row is read on access."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from spard.data.jsonl import UTF8_BOM, BadRow, decode_line, file_chunks, parse_row, placed_rows
from spard.data.problems import raise_first_error
from spard.data.row_rules import is_benign, pool_row
from spard.data.rows import Example, pool_example
from spard.errors import InvalidPool

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
