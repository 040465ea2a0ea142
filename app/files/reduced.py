"""A training file without some of its rows, as a new file; the old one stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from app import objects
from app.audit_log import service as audit_log
from app.db import Begin
from app.db.base import new_id
from app.db.tables import File
from app.files import service as files
from app.files.upload import Received, check_in, key_of, new_file, planned
from app.files.validation import Limits
from app.quotas import service as quotas
from app.storage import Storage
from spard.data.jsonl import numbered_texts
from spard.data.row_rules import TrainingRows


def without(storage: Storage, begin: Begin, file: File, lines: Collection[int], limits: Limits) -> File:
    """Store the file's rows but for those on `lines`, and note in the audit log of what it was made."""
    file_id = new_id("file-")
    key = key_of(file.project_id, file_id)
    name = f"{file.filename.removesuffix('.jsonl')[:200]}-without-{len(lines)}.jsonl"
    plan = partial(planned, project_id=file.project_id, file_id=file_id, expected=file.bytes)
    with objects.writing(storage, begin, plan) as writing:
        stored, report = check_in(writing, key, _left(storage, file, lines), TrainingRows(), limits)
        received = Received(key, name, stored, report)
        made = new_file(file_id, file.project_id, received, limits, expires_at=file.expires_at)
        with begin() as session:
            writing.named(session, key)
            quotas.check_file(session, made)
            files.add(session, made)
            audit_log.record(session, "file.reduced", made.id, source=file.id, rows_left_out=len(lines))
    return made


def _left(storage: Storage, file: File, lines: Collection[int]) -> Iterator[bytes]:
    for line, text in numbered_texts(storage.chunks(file.storage_key)):
        if line not in lines:
            yield f"{text}\n".encode()
