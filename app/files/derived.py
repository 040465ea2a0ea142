"""Create a new file from an existing one with the checks of an upload; the original is unchanged.

The new file leaves out some of the rows, or has them converted from another chat format to OpenAI's; the first
converted rows can be previewed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Literal

from sqlalchemy.orm import Session

from app import audit_log, objects, quotas
from app.db import Begin
from app.db.base import new_id
from app.db.tables import File
from app.errors import InvalidState
from app.files import service as files
from app.files.preview import read_rows
from app.files.schemas import Conversion, FileOut
from app.files.upload import Received, file_key, new_file, plan_file, write_checked
from app.files.validation import Limits
from app.storage import Storage
from spard.data import other_formats
from spard.data.jsonl import Row, numbered_texts
from spard.data.other_formats import NotConvertible
from spard.data.row_rules import TrainingRows

_NAME_CHARS = 200
_SHOWN_ROWS = 5
_CONVERTIBLE = frozenset(f"{kind}_format" for kind in other_formats.NAMES)
Form = Literal["sharegpt", "alpaca", "trl", "openai"]


def derive(
    storage: Storage,
    begin: Begin,
    file: File,
    rows: Iterator[bytes],
    ending: str,
    limits: Limits,
    note: Callable[[Session, File], None] = lambda session, made: None,
) -> File:
    """Store `rows`, lines of JSONL, as a new file under the original's name with `ending` appended.

    `note` is called in the transaction that adds the file. Raises the same errors as an upload of these rows; nothing
    is stored then.
    """
    file_id = new_id("file-")
    key = file_key(file.project_id, file_id)
    name = f"{file.filename.removesuffix('.jsonl')[:_NAME_CHARS]}-{ending}.jsonl"
    # The size of the new file is not known yet; until then the original's counts against the quota.
    plan = partial(plan_file, project_id=file.project_id, file_id=file_id, expected=file.bytes)
    with objects.writing(storage, begin, plan) as writing:
        stored, report = write_checked(writing, key, rows, TrainingRows(), limits, name)
        received = Received(key, name, stored, report)
        made = new_file(file_id, file.project_id, received, limits, expires_at=file.expires_at)
        with begin() as session:
            writing.keep(session, key)
            quotas.check_file(session, made)
            files.add(session, made)
            note(session, made)
    return made


def store_without_lines(storage: Storage, begin: Begin, file: File, lines: Collection[int], limits: Limits) -> File:
    """Store the file's rows except those on `lines` as a new file, and record its source in the audit log."""

    def note(session: Session, made: File) -> None:
        audit_log.record(session, "file.reduced", made.id, source=file.id, rows_left_out=len(lines))

    return derive(storage, begin, file, _remaining_rows(storage, file, lines), f"without-{len(lines)}", limits, note)


def _remaining_rows(storage: Storage, file: File, lines: Collection[int]) -> Iterator[bytes]:
    for line, text in numbered_texts(storage.chunks(file.storage_key)):
        if line not in lines:
            yield f"{text}\n".encode()


def is_convertible(file: File) -> bool:
    """Return True if the listed problems of a file show a format that can be converted."""
    return any(problem["code"] in _CONVERTIBLE for problem in file.problems or [])


def preview_conversion(storage: Storage, file: File, leave_out: Collection[str] = ()) -> Conversion:
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
            if len(self._shown) < _SHOWN_ROWS:
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
