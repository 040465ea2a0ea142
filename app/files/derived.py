"""Create a new file from an existing one with the checks of an upload; the original is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from sqlalchemy.orm import Session

from app import objects
from app.audit_log import service as audit_log
from app.db import Begin
from app.db.base import new_id
from app.db.tables import File
from app.files import service as files
from app.files.upload import Received, file_key, new_file, plan_file, write_checked
from app.files.validation import Limits
from app.quotas import service as quotas
from app.storage import Storage
from spard.data.jsonl import numbered_texts
from spard.data.row_rules import TrainingRows

_NAME_CHARS = 200


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


# Create a training file without some of the rows of another one; the original is unchanged.


def store_without_lines(storage: Storage, begin: Begin, file: File, lines: Collection[int], limits: Limits) -> File:
    """Store the file's rows except those on `lines` as a new file, and record its source in the audit log."""

    def note(session: Session, made: File) -> None:
        audit_log.record(session, "file.reduced", made.id, source=file.id, rows_left_out=len(lines))

    return derive(storage, begin, file, _remaining_rows(storage, file, lines), f"without-{len(lines)}", limits, note)


def _remaining_rows(storage: Storage, file: File, lines: Collection[int]) -> Iterator[bytes]:
    for line, text in numbered_texts(storage.chunks(file.storage_key)):
        if line not in lines:
            yield f"{text}\n".encode()
