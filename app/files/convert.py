"""A file in another form becomes a new file in ours when its owner asks for it; the first rows can be seen before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from app.db import Begin
from app.db.tables import File
from app.errors import InvalidState
from app.files.derived import derive
from app.files.preview import lines_of
from app.files.schemas import Conversion, FileOut
from app.files.validation import Limits
from app.storage import Storage
from spard.data import other_formats

_SHOWN = 5


def look(storage: Storage, file: File) -> Conversion:
    """Return the first rows as they would be converted, and store nothing."""
    rows = list(islice(lines_of(storage, file), _SHOWN))
    shown = [_as_chat(line, row) for line, row in rows]
    kind = next(kind for _, row in rows if (kind := other_formats.kind_of(row)))  # else none could be converted
    return Conversion(source_file=file.id, format=kind, data=shown, file=None)


def convert(storage: Storage, begin: Begin, file: File, limits: Limits) -> Conversion:
    """Every row, as a new file that passes the checks of every other; the old one stays as it is."""
    shown = look(storage, file)
    made = derive(storage, begin, file, _converted(storage, file), "converted", limits)
    shown.file = FileOut.model_validate(made)
    return shown


def _converted(storage: Storage, file: File) -> Iterator[bytes]:
    for line, row in lines_of(storage, file):
        yield json.dumps(_as_chat(line, row)).encode() + b"\n"


def _as_chat(line: int, row: dict[str, Any]) -> dict[str, Any]:
    try:
        return other_formats.converted(row)
    except other_formats.NotConvertible as error:
        message = f"Line {line} cannot be converted: {error}."
        raise InvalidState(message, code="not_convertible", param="file_id") from None
