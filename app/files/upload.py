"""Receive files: stream uploads through the checks to storage, and make new files from existing ones.

Uploads are received in bounded memory and outside of transactions. A file that is made from an existing one gets the
checks of an upload, and the original is unchanged. It leaves out some of the rows, or has them converted from another
chat format to OpenAI's; the first converted rows can be previewed.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from sqlalchemy.orm import Session

from app import audit_log, objects, quotas
from app.db import Begin
from app.db.base import new_id, utc_now
from app.db.tables import File
from app.db.tables.files import FINE_TUNE
from app.errors import InvalidRequest, InvalidState
from app.files import service as files
from app.files.findings import summary
from app.files.preview import read_rows
from app.files.schemas import Conversion, FileOut
from app.files.tables import ENDINGS, read_lines
from app.files.validation import Limits, Report, Validator
from app.http.bodies import Form
from app.objects import ObjectWriter, PlannedObject
from app.storage import Storage, StoredObject
from spard.data import other_formats
from spard.data.jsonl import Row, numbered_texts
from spard.data.other_formats import NotConvertible
from spard.data.row_rules import RowRule, TrainingRows

_MAX_NAME = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_EXPIRY_S = range(3600, 2_592_000 + 1)


@dataclass(frozen=True, slots=True)
class ReceivedFile:
    """A file that is in storage but not yet in the database."""

    key: str
    name: str
    stored: StoredObject
    report: Report


def receive(writing: ObjectWriter, form: Form, key: str, rule: RowRule, limits: Limits) -> ReceivedFile:
    """Stream the form's file through the checks to storage under `key`; see `write_checked`."""
    form.fields_before_file()
    name = clean_name(form.filename or "", "file")
    stored, report = write_checked(writing, key, form.file(), rule, limits, name)
    return ReceivedFile(key, name_of_lines(name), stored, report)


def write_checked(
    writing: ObjectWriter, key: str, chunks: Iterator[bytes], rule: RowRule, limits: Limits, name: str
) -> tuple[StoredObject, Report]:
    """Write the rows of a file as JSON lines through the checks to storage.

    Returns the stored object and the validation report. Raises `InvalidRequest` or `TooLarge` for a file that is not
    text rows at all; a file with bad rows is stored, and the report lists them.
    """
    lines = read_lines(chunks, name, limits.bytes, limits.line_bytes)
    validator = Validator(rule, limits, was=lines.was)
    # Evaluated from left to right: `finish` runs after all bytes were written and checked.
    return writing.write(key, _feed_validator(validator, lines.chunks)), validator.finish()


def upload(storage: Storage, begin: Begin, project_id: str, form: Form, limits: Limits) -> File:
    """Receive a file of the purpose `fine-tune`, and store it with its validation report; return its row.

    No transaction is open while the body arrives. Raises `InvalidRequest` or `TooLarge` for a file that is not text
    rows, and `QuotaExceeded` if the project has no room for it.
    """
    file_id = new_id("file-")
    key = file_key(project_id, file_id)
    plan = partial(plan_file, project_id=project_id, file_id=file_id, expected=form.most_bytes(limits.bytes))
    with objects.writing(storage, begin, plan) as writing:
        received = receive(writing, form, key, TrainingRows(), limits)
        file = new_file(file_id, project_id, received, limits, expires_at=_checked_fields(form.fields))
        with begin() as session:
            writing.keep(session, key)
            quotas.check_file(session, file)
            files.add(session, file)
    return file


def file_key(project_id: str, file_id: str) -> str:
    """Return the storage key of a file."""
    return f"tenants/{project_id}/files/{file_id}"


def plan_file(session: Session, project_id: str, file_id: str, expected: int) -> Sequence[PlannedObject]:
    """Plan the storage of a file of `expected` bytes; raise `QuotaExceeded` if its project has no room."""
    room = quotas.room_for_file(session, project_id, expected)
    return [PlannedObject(file_key(project_id, file_id), project_id, file_id, room.bytes, room.limit)]


def new_file(
    file_id: str, project_id: str, received: ReceivedFile, limits: Limits, *, expires_at: datetime | None
) -> File:
    """Return the row for a training file whose bytes are in storage."""
    report, found = received.report, received.report.finding_list()
    return File(
        id=file_id,
        project_id=project_id,
        filename=received.name,
        purpose=FINE_TUNE,
        bytes=received.stored.bytes,
        sha256=received.stored.sha256,
        storage_key=received.key,
        status=limits.bad_status if report.errors else "processed",
        status_details=summary(found),
        rows=report.rows,
        problems=report.problem_list(),
        findings=[dict(each) for each in found],
        tool_lines=report.tool_lines,
        row_format=report.row_format,
        expires_at=expires_at,
    )


def clean_name(name: str, param: str) -> str:
    """Return a file name without folders; it is displayed but never opened.

    Raises `InvalidRequest`, about `param`, for a name that is empty, too long or has an unsupported ending.
    """
    name = unicodedata.normalize("NFC", re.split(r"[/\\]", name)[-1])
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        message = f"A file name has 1 to {_MAX_NAME} printable characters."
        raise InvalidRequest(message, code="invalid_name", param=param)
    if "." in name and not name.lower().endswith((".jsonl", *ENDINGS)):
        message = f"{name!r} is not a .jsonl file; {', '.join(ENDINGS)} are taken, too."
        raise InvalidRequest(message, code="unsupported_format", param=param)
    return name


def name_of_lines(name: str) -> str:
    """Return a file's name with the ending `.jsonl`, under which its rows are stored."""
    ending = next((each for each in ENDINGS if name.lower().endswith(each)), None)
    return f"{name[: -len(ending)]}.jsonl" if ending else name


def _feed_validator(validator: Validator, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        validator.feed(chunk)
        yield chunk


def check_purpose(purpose: str | None) -> None:
    """Raise `InvalidRequest` unless the purpose is `fine-tune`."""
    if purpose != FINE_TUNE:
        message = f"purpose must be {FINE_TUNE!r}; other purposes are not served here."
        raise InvalidRequest(message, code="invalid_purpose", param="purpose")


def _checked_fields(fields: dict[str, str]) -> datetime | None:
    """Check the form's fields other than the file; return when the file expires, or None."""
    check_purpose(fields.get("purpose"))
    for name in sorted(fields.keys() - {"purpose", _ANCHOR, _SECONDS}):
        raise InvalidRequest(f"The field {name[:64]!r} is unknown.", code="extra_forbidden", param=name[:64])
    if not fields.keys() & {_ANCHOR, _SECONDS}:
        return None
    if fields.get(_ANCHOR) != "created_at":
        raise InvalidRequest("The anchor must be 'created_at'.", code="not_allowed", param=_ANCHOR)
    seconds = fields.get(_SECONDS, "")
    if not re.fullmatch(r"[0-9]{1,8}", seconds) or int(seconds) not in _EXPIRY_S:
        message = f"seconds must be from {_EXPIRY_S.start} to {_EXPIRY_S.stop - 1}."
        raise InvalidRequest(message, code="out_of_range", param=_SECONDS)
    return utc_now() + timedelta(seconds=int(seconds))


# Make a new file from an existing one.

_NAME_CHARS = 200
_SHOWN_ROWS = 5
_CONVERTIBLE = frozenset(f"{kind}_format" for kind in other_formats.NAMES)
ChatFormat = Literal["sharegpt", "alpaca", "trl", "openai"]


def derive_file(
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
        received = ReceivedFile(key, name, stored, report)
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

    return derive_file(
        storage, begin, file, _remaining_rows(storage, file, lines), f"without-{len(lines)}", limits, note
    )


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


def convert_file(
    storage: Storage, begin: Begin, file: File, limits: Limits, leave_out: Collection[str] = ()
) -> Conversion:
    """Convert every row and store the result as a new file, with the checks of an upload.

    The original file is unchanged. `leave_out` names columns to drop. Raises `InvalidState` for a row that cannot be
    converted, or if the rows are in OpenAI's form already.
    """
    rows = _Rows(read_rows(storage, file), leave_out)
    lines = (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    return rows.conversion(file, derive_file(storage, begin, file, lines, "converted", limits))


class _Rows:
    """Iterates over a file's rows, converted to OpenAI's form, and collects the facts for the report on the conversion.

    Raises `InvalidState` for a row that cannot be converted, and at the end if no row was changed.
    """

    def __init__(self, rows: Iterator[tuple[int, Row]], leave_out: Collection[str]) -> None:
        self._rows, self._leave_out = rows, leave_out
        self._form: ChatFormat = "openai"
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


def _convert_row(line: int, row: Row, leave_out: Collection[str]) -> other_formats.ConvertedRow:
    try:
        return other_formats.convert_row(row, leave_out)
    except other_formats.ColumnsLost as lost:
        names = " ".join(f"--leave-out {name[:64]}" for name in lost.columns[:10])
        message = f"Line {line}: {lost}. Remove it from the file, or leave it out: {names} (leave_out in the request)."
    except NotConvertible as error:
        message = f"Line {line} cannot be converted: {error}."
    raise InvalidState(message, code="not_convertible", param="file_id")
