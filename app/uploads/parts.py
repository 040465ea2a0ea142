"""The bytes of uploads: parts as they arrive, and the file put together from them, with no transaction open."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import timedelta

from app.errors import InvalidRequest, TooLarge
from app.files.rows import TrainingRows
from app.files.schemas import FileOut
from app.files.upload import Begin, Received, check_in, new_file, nothing_left
from app.files.validation import Limits
from app.models import File, new_id, utc_now
from app.multipart import Form
from app.storage import Storage
from app.uploads import service
from app.uploads.models import Upload, UploadPart
from app.uploads.schemas import UploadComplete, UploadOut

PART_BYTES = 64 << 20


def receive_part(storage: Storage, begin: Begin, tenant_id: str, upload_id: str, form: Form) -> UploadPart:
    """Stream one part to storage."""
    with begin() as session:
        upload = service.pending(session, tenant_id, upload_id)
    part = UploadPart(id=new_id("part_"), upload_id=upload.id)
    part.storage_key = f"{folder(upload)}/{part.id}"
    part.bytes = storage.write(part.storage_key, _at_most(PART_BYTES, form.file())).bytes
    with nothing_left(storage, part.storage_key), begin() as session:
        if form.fields:
            name = min(form.fields)[:64]
            raise InvalidRequest(f"The field {name!r} is unknown.", code="extra_forbidden", param=name)
        return service.add_part(session, tenant_id, part)


def complete(
    storage: Storage, begin: Begin, tenant_id: str, upload_id: str, ask: UploadComplete, limits: Limits
) -> UploadOut:
    """Make one file of the parts; it passes the checks of every other file."""
    with begin() as session:
        earlier = service.completed(session, tenant_id, upload_id, ask)
        if earlier is not None:
            return _shown(*earlier)
        upload = service.pending(session, tenant_id, upload_id)
        parts = service.chosen_parts(session, upload, ask.part_ids)
    file = _assembled(storage, upload, parts, ask.md5, limits)
    with nothing_left(storage, file.storage_key), begin() as session:
        upload = service.complete(session, tenant_id, upload_id, ask.part_ids, file)
    storage.delete_prefix(folder(upload))
    return _shown(upload, file)


def sweep(storage: Storage, begin: Begin) -> None:
    """Remove the bytes of uploads that nobody has completed in time."""
    with begin() as session:
        expired = service.expire(session)
    for upload in expired:
        storage.delete_prefix(folder(upload))


def folder(upload: Upload) -> str:
    """Where the parts lie."""
    return f"tenants/{upload.tenant_id}/uploads/{upload.id}"


def _assembled(storage: Storage, upload: Upload, parts: Iterable[UploadPart], md5: str | None, limits: Limits) -> File:
    file_id, digest = new_id("file-"), hashlib.md5(usedforsecurity=False)
    key = f"tenants/{upload.tenant_id}/files/{file_id}"

    def chunks() -> Iterator[bytes]:
        for part in parts:
            for chunk in storage.chunks(part.storage_key):
                digest.update(chunk)
                yield chunk

    stored, report = check_in(storage, key, chunks(), TrainingRows(), limits)
    with nothing_left(storage, key):
        if md5 is not None and digest.hexdigest() != md5.lower():
            message = f"The MD5 of the file is {digest.hexdigest()}, not {md5.lower()}."
            raise InvalidRequest(message, code="md5_mismatch", param="md5")
    seconds = upload.file_expires_after_s
    expires_at = utc_now() + timedelta(seconds=seconds) if seconds else None
    return new_file(file_id, upload.tenant_id, Received(key, upload.filename, stored, report), expires_at)


def _shown(upload: Upload, file: File) -> UploadOut:
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
