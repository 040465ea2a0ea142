"""Receive the parts of uploads and assemble the file from them, without an open transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from app import objects
from app.db import Begin
from app.db.base import new_id, utc_now
from app.db.tables import File, Upload, UploadPart
from app.errors import InvalidRequest, TooLarge
from app.files.schemas import FileOut
from app.files.upload import Received, file_key, name_of_lines, new_file, write_checked
from app.files.validation import Limits
from app.http.multipart import Form
from app.objects import Planned
from app.quotas import service as quotas
from app.storage import Storage
from app.uploads import service
from app.uploads.schemas import UploadComplete, UploadOut
from spard.data.row_rules import TrainingRows

PART_BYTES = 64 << 20


def receive_part(storage: Storage, begin: Begin, project_id: str, upload_id: str, form: Form) -> UploadPart:
    """Stream one part to storage and add it to its upload."""
    part = UploadPart(id=new_id("part_"), upload_id=upload_id)
    expected = form.most_bytes(PART_BYTES)

    def plan(session: Session) -> Sequence[Planned]:
        upload = service.pending(session, project_id, upload_id)
        room = quotas.room_for_part(session, upload, expected)
        part.storage_key = f"{service.folder(upload)}/{part.id}"
        return [Planned(part.storage_key, project_id, upload_id, room.bytes, room.limit)]

    with objects.writing(storage, begin, plan) as writing:
        part.bytes = writing.write(part.storage_key, _at_most(PART_BYTES, form.file())).bytes
        # Fields may follow the file, so they are checked after it.
        if form.fields:
            name = min(form.fields)[:64]
            raise InvalidRequest(f"The field {name!r} is unknown.", code="extra_forbidden", param=name)
        with begin() as session:
            writing.keep(session, part.storage_key)
            return service.add_part(session, project_id, part)


def complete(
    storage: Storage, begin: Begin, project_id: str, upload_id: str, ask: UploadComplete, limits: Limits
) -> UploadOut:
    """Assemble the file from its parts and validate it like any other file.

    A repeated request returns the existing file. Raises `InvalidRequest` if parts, size or MD5 do not match.
    """
    with begin() as session:
        done = service.find_completed(session, project_id, upload_id, ask)
        if done is None:
            upload = service.pending(session, project_id, upload_id)
            parts = service.chosen_parts(session, upload, ask.part_ids)
    if done is None:
        done = _complete(storage, begin, upload, parts, ask, limits)
    objects.perform(storage, begin, upload_id)
    return _upload_response(*done)


def cancel(storage: Storage, begin: Begin, project_id: str, upload_id: str) -> Upload:
    """Cancel an upload; if its bytes could not be deleted, a repeated request tries again."""
    with begin() as session:
        upload = service.get(session, project_id, upload_id)
        if upload.status != "cancelled" or not objects.has_deletions(session, project_id, upload_id):
            upload = service.cancel(session, project_id, upload_id)
    objects.perform(storage, begin, upload_id)
    return upload


def sweep(storage: Storage, begin: Begin) -> None:
    """Delete the bytes of uploads that were not completed in time."""
    with begin() as session:
        expired = service.expire(session)
    for upload in expired:
        objects.perform(storage, begin, upload.id)


def _complete(
    storage: Storage,
    begin: Begin,
    upload: Upload,
    parts: Sequence[UploadPart],
    ask: UploadComplete,
    limits: Limits,
) -> tuple[Upload, File]:
    """Write the file and add its row; until then its bytes are counted by the upload."""
    file_id, digest = new_id("file-"), hashlib.md5(usedforsecurity=False)
    key = file_key(upload.project_id, file_id)

    def chunks() -> Iterator[bytes]:
        for part in parts:
            for chunk in storage.chunks(part.storage_key):
                digest.update(chunk)
                yield chunk

    # 0 bytes: the upload counts against the quota until the file replaces it.
    planned = [Planned(key, upload.project_id, file_id)]
    with objects.writing(storage, begin, lambda session: planned) as writing:
        stored, report = write_checked(writing, key, chunks(), TrainingRows(), limits, upload.filename)
        if ask.md5 is not None and digest.hexdigest() != ask.md5.lower():
            message = f"The MD5 of the file is {digest.hexdigest()}, not {ask.md5.lower()}."
            raise InvalidRequest(message, code="md5_mismatch", param="md5")
        received = Received(key, name_of_lines(upload.filename), stored, report)
        file = new_file(file_id, upload.project_id, received, limits, expires_at=_expiry(upload))
        with begin() as session:
            writing.keep(session, key)
            return service.complete(session, upload.project_id, upload.id, ask.part_ids, file), file


def _expiry(upload: Upload) -> datetime | None:
    seconds = upload.file_expires_after_s
    return utc_now() + timedelta(seconds=seconds) if seconds else None


def _upload_response(upload: Upload, file: File) -> UploadOut:
    shown = UploadOut.model_validate(upload)
    shown.file = FileOut.model_validate(file)
    return shown


def _at_most(limit: int, chunks: Iterable[bytes]) -> Iterator[bytes]:
    left = limit
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise TooLarge(f"A part has at most {limit} bytes.", code="part_too_large", param="data")
        yield chunk
