"""A file in another form becomes a new file in ours when its owner asks for it; the first rows can be seen before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from app.errors import InvalidState
from app.files import foreign
from app.files import service as files
from app.files.preview import lines_of
from app.files.rows import TrainingRows
from app.files.schemas import Conversion, FileOut
from app.files.upload import Begin, Received, check_in, new_file, nothing_left
from app.files.validation import Limits
from app.models import File, new_id
from app.quotas import service as quotas
from app.storage import Storage

_SHOWN = 5


def look(storage: Storage, file: File) -> Conversion:
    """The first rows as they would become; nothing is made."""
    rows = list(islice(lines_of(storage, file), _SHOWN))
    shown = [_as_chat(line, row) for line, row in rows]
    kind = next(kind for _, row in rows if (kind := foreign.kind_of(row)))  # else none could be converted
    return Conversion(source_file=file.id, format=kind, data=shown, file=None)


def convert(storage: Storage, begin: Begin, file: File, limits: Limits) -> Conversion:
    """Every row, as a new file that passes the checks of every other; the old one stays as it is."""
    shown, file_id = look(storage, file), new_id("file-")
    key = f"tenants/{file.tenant_id}/files/{file_id}"
    stored, report = check_in(storage, key, _converted(storage, file), TrainingRows(), limits)
    stem = file.filename.removesuffix(".jsonl")[:200]
    made = new_file(
        file_id, file.tenant_id, Received(key, f"{stem}-converted.jsonl", stored, report), expires_at=file.expires_at
    )
    with nothing_left(storage, key), begin() as session:
        quotas.check_file(session, made)
        files.add(session, made)
    shown.file = FileOut.model_validate(made)
    return shown


def _converted(storage: Storage, file: File) -> Iterator[bytes]:
    for line, row in lines_of(storage, file):
        yield json.dumps(_as_chat(line, row)).encode() + b"\n"


def _as_chat(line: int, row: dict[str, Any]) -> dict[str, Any]:
    try:
        return foreign.converted(row)
    except foreign.NotConvertible as error:
        message = f"Line {line} cannot be converted: {error}."
        raise InvalidState(message, code="not_convertible", param="file_id") from None
