"""Create a training file without some of the rows of another one; the original is unchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.db import Begin
from app.db.tables import File
from app.files.derived import derive
from app.files.validation import Limits
from app.storage import Storage
from spard.data.jsonl import numbered_texts


def store_without_lines(storage: Storage, begin: Begin, file: File, lines: Collection[int], limits: Limits) -> File:
    """Store the file's rows except those on `lines` as a new file, and record its source in the audit log."""

    def note(session: Session, made: File) -> None:
        audit_log.record(session, "file.reduced", made.id, source=file.id, rows_left_out=len(lines))

    return derive(storage, begin, file, _remaining_rows(storage, file, lines), f"without-{len(lines)}", limits, note)


def _remaining_rows(storage: Storage, file: File, lines: Collection[int]) -> Iterator[bytes]:
    for line, text in numbered_texts(storage.chunks(file.storage_key)):
        if line not in lines:
            yield f"{text}\n".encode()
