"""Receive uploads: stream a file through the checks to storage, in bounded memory and outside of transactions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.orm import Session

from app import objects, quotas
from app.db import Begin
from app.db.base import new_id, utc_now
from app.db.tables import File
from app.db.tables.files import FINE_TUNE
from app.errors import InvalidRequest
from app.files import service
from app.files.findings import summary
from app.files.tables import ENDINGS, read_lines
from app.files.validation import Limits, Report, Validator
from app.http.bodies import Form
from app.objects import Planned, Writing
from app.storage import Storage, Stored
from spard.data.row_rules import RowRule, TrainingRows

_MAX_NAME = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_EXPIRY_S = range(3600, 2_592_000 + 1)


@dataclass(frozen=True, slots=True)
class Received:
    """A file that is in storage but not yet in the database."""

    key: str
    name: str
    stored: Stored
    report: Report


def receive(writing: Writing, form: Form, key: str, rule: RowRule, limits: Limits) -> Received:
    """Stream the form's file through the checks to storage under `key`; see `write_checked`."""
    form.fields_before_file()
    name = clean_name(form.filename or "", "file")
    stored, report = write_checked(writing, key, form.file(), rule, limits, name)
    return Received(key, name_of_lines(name), stored, report)


def write_checked(
    writing: Writing, key: str, chunks: Iterator[bytes], rule: RowRule, limits: Limits, name: str
) -> tuple[Stored, Report]:
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
            service.add(session, file)
    return file


def file_key(project_id: str, file_id: str) -> str:
    """Return the storage key of a file."""
    return f"tenants/{project_id}/files/{file_id}"


def plan_file(session: Session, project_id: str, file_id: str, expected: int) -> Sequence[Planned]:
    """Plan the storage of a file of `expected` bytes; raise `QuotaExceeded` if its project has no room."""
    room = quotas.room_for_file(session, project_id, expected)
    return [Planned(file_key(project_id, file_id), project_id, file_id, room.bytes, room.limit)]


def new_file(file_id: str, project_id: str, received: Received, limits: Limits, *, expires_at: datetime | None) -> File:
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
