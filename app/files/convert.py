"""Convert a file from another chat format to OpenAI's as a new file, or preview its first converted rows."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator
from typing import Literal

from app.db import Begin
from app.db.tables import File
from app.errors import InvalidState
from app.files.derived import derive
from app.files.preview import read_rows
from app.files.schemas import Conversion, FileOut
from app.files.validation import Limits
from app.storage import Storage
from spard.data import other_formats
from spard.data.jsonl import Row
from spard.data.other_formats import NotConvertible

_SHOWN = 5
_CONVERTIBLE = frozenset(f"{kind}_format" for kind in other_formats.NAMES)

Form = Literal["sharegpt", "alpaca", "trl", "openai"]


def is_convertible(file: File) -> bool:
    """Return True if the listed problems of a file show a format that can be converted."""
    return any(problem["code"] in _CONVERTIBLE for problem in file.problems or [])


def look(storage: Storage, file: File, leave_out: Collection[str] = ()) -> Conversion:
    """Convert every row without storing anything; return the first rows.

    `leave_out` names columns to drop. Raises `InvalidState` for a row that cannot be converted.
    """
    rows = _Rows(read_rows(storage, file), leave_out)
    # Runs the iterator to its end without keeping rows: every row is checked, not only those that are shown.
    deque(rows, maxlen=0)
    return rows.conversion(file, None)


def convert(storage: Storage, begin: Begin, file: File, limits: Limits, leave_out: Collection[str] = ()) -> Conversion:
    """Convert every row and store the result as a new file, with the checks of an upload.

    The original file is unchanged. `leave_out` names columns to drop. Raises `InvalidState` for a row that cannot be
    converted, or if the rows are in OpenAI's form already.
    """
    rows = _Rows(read_rows(storage, file), leave_out)
    lines = (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    return rows.conversion(file, derive(storage, begin, file, lines, "converted", limits))


class _Rows:
    """Iterates over a file's rows in OpenAI's form, and collects what the answer reports on the conversion.

    Raises `InvalidState` for a row that cannot be converted, and at the end if no row was changed.
    """

    def __init__(self, rows: Iterator[tuple[int, Row]], leave_out: Collection[str]) -> None:
        self._rows, self._leave_out = rows, leave_out
        self._form: Form = "openai"
        self._left_out: set[str] = set()
        self._shown: list[Row] = []

    def __iter__(self) -> Iterator[Row]:
        is_changed = False
        for line, row in self._rows:
            made = _convert_row(line, row, self._leave_out)
            is_changed = is_changed or made.row != row
            # The first row in another format names the file's format; rows in OpenAI's form may precede it.
            if self._form == "openai":
                self._form = other_formats.foreign_format(row) or "openai"
            self._left_out |= made.left_out
            if len(self._shown) < _SHOWN:
                self._shown.append(made.row)
            yield made.row
        if not is_changed:
            message = "The rows are already in OpenAI's format; there is nothing to convert."
            raise InvalidState(message, code="not_convertible", param="file_id")

    def conversion(self, source: File, made: File | None) -> Conversion:
        """Return the report on the conversion; call it after the iteration."""
        return Conversion(
            source_file=source.id,
            format=self._form,
            left_out=sorted(self._left_out),
            data=self._shown,
            file=None if made is None else FileOut.model_validate(made),
        )


def _convert_row(line: int, row: Row, leave_out: Collection[str]) -> other_formats.Converted:
    try:
        return other_formats.convert_row(row, leave_out)
    except other_formats.ColumnsLost as lost:
        names = " ".join(f"--leave-out {name[:64]}" for name in lost.columns[:10])
        message = f"Line {line}: {lost}. Remove it from the file, or leave it out: {names} (leave_out in the request)."
    except NotConvertible as error:
        message = f"Line {line} cannot be converted: {error}."
    raise InvalidState(message, code="not_convertible", param="file_id")
