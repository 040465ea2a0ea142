"""OpenAI's uploads: create one, receive its parts, and assemble the file from them.

Rows are changed in short transactions, each query limited to one project; parts are received and assembled without an
open transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app import db, objects, quotas
from app.db import Begin, timestamp
from app.db.base import new_id, utc_now
from app.db.tables import File, Upload, UploadPart
from app.errors import InvalidRequest, InvalidState, NotFound, TooLarge
from app.files import service as files
from app.files.schemas import FileOut
from app.files.upload import ReceivedFile, check_purpose, clean_name, file_key, name_of_lines, new_file, write_checked
from app.files.validation import Limits
from app.http.bodies import Form
from app.http.schemas import Body, UnixTime
from app.objects import PlannedObject
from app.storage import Storage
from spard.data import jsonl
from spard.data.row_rules import TrainingRows

_LIVES = timedelta(hours=1)
_SWEPT_AT_ONCE = 100
_SENDINGS = 3  # a client may send a part again, twice
PART_BYTES = 64 << 20


class ExpiresAfter(Body):
    """When the finished file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class UploadCreate(Body):
    """A file to upload in parts that have exactly `bytes` bytes in total."""

    filename: Annotated[str, Field(max_length=255)]
    purpose: Annotated[str, Field(max_length=64)]
    bytes: Annotated[int, Field(ge=1, le=2**53)]
    mime_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}/[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$")]
    expires_after: ExpiresAfter | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_plain_text(cls, body: Any) -> Any:
        jsonl.check_json(body)
        return body


class UploadComplete(Body):
    """The parts of the file in order; `md5` is the MD5 of the whole file."""

    part_ids: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=10_000)]
    md5: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


class PartOut(BaseModel):
    """A part that is in storage."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: UnixTime
    upload_id: str


class UploadOut(BaseModel):
    """An upload; `file` is present once it is completed."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["upload"] = "upload"
    created_at: UnixTime
    expires_at: UnixTime
    filename: str
    bytes: int
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: FileOut | None = None


def create(session: Session, project_id: str, ask: UploadCreate, max_bytes: int) -> Upload:
    """Create an upload, which expires in an hour; raise `TooLarge` above `max_bytes`."""
    check_purpose(ask.purpose)
    if ask.bytes > max_bytes:
        raise TooLarge(f"An upload has at most {max_bytes} bytes.", param="bytes")
    upload = Upload(
        project_id=project_id,
        filename=clean_name(ask.filename, "filename"),
        purpose=ask.purpose,
        bytes=ask.bytes,
        expires_at=db.clock(session) + _LIVES,
        file_expires_after_s=ask.expires_after.seconds if ask.expires_after else None,
    )
    quotas.check_upload(session, project_id, ask.bytes)
    session.add(upload)
    session.flush()
    return upload


def get(session: Session, project_id: str, upload_id: str) -> Upload:
    """Return the project's upload, locked; raise `NotFound` for another project's."""
    query = select(Upload).where(Upload.project_id == project_id, Upload.id == upload_id).with_for_update()
    upload = session.scalar(query)
    if upload is None:
        raise NotFound(f"No such Upload object: {upload_id}", code="upload_not_found", param="upload_id")
    return upload


def pending(session: Session, project_id: str, upload_id: str) -> Upload:
    """Return the project's upload, locked; raise `InvalidState` if it accepts no more parts."""
    upload = get(session, project_id, upload_id)
    if upload.status == "pending" and upload.expires_at <= db.clock(session):
        raise InvalidState(f"{upload.id} has expired; begin a new upload.", code="upload_expired")
    if upload.status != "pending":
        raise InvalidState(f"{upload.id} is {upload.status}; begin a new upload.")
    return upload


def add_part(session: Session, project_id: str, part: UploadPart) -> UploadPart:
    """Add a part that is in storage; raise `TooLarge` if the parts far exceed the announced size."""
    upload = pending(session, project_id, part.upload_id)
    earlier = session.scalar(select(func.sum(UploadPart.bytes)).where(UploadPart.upload_id == upload.id)) or 0
    # Parts that were sent twice stay until the upload ends, so more bytes than announced are normal, up to a limit.
    if earlier + part.bytes > _SENDINGS * upload.bytes:
        message = f"The parts have far more than the {upload.bytes} bytes that were announced."
        raise TooLarge(message, code="too_many_parts", param="data")
    session.add(part)
    session.flush()
    return part


def chosen_parts(session: Session, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
    """Return the parts in the requested order; raise unless they have exactly the announced number of bytes."""
    known = {part.id: part for part in session.scalars(select(UploadPart).where(UploadPart.upload_id == upload.id))}
    unknown = next((part_id for part_id in part_ids if part_id not in known), None)
    if unknown is not None:
        raise InvalidRequest(f"{upload.id} has no part {unknown!r}.", code="part_not_found", param="part_ids")
    if len(set(part_ids)) < len(part_ids):
        raise InvalidRequest("A part is named twice.", code="duplicate_part", param="part_ids")
    parts = [known[part_id] for part_id in part_ids]
    found = sum(part.bytes for part in parts)
    if found != upload.bytes:
        message = f"The parts have {found} bytes, but {upload.bytes} were announced."
        raise InvalidRequest(message, code="size_mismatch", param="part_ids")
    return parts


def find_completed(
    session: Session, project_id: str, upload_id: str, ask: UploadComplete
) -> tuple[Upload, File] | None:
    """Return the upload and its file if the same request has completed it before; otherwise None."""
    upload = get(session, project_id, upload_id)
    file = session.get(File, upload.file_id) if upload.file_id else None
    return (upload, file) if file is not None and upload.part_ids == ask.part_ids else None


def record_completion(session: Session, project_id: str, upload_id: str, part_ids: Sequence[str], file: File) -> Upload:
    """Change the upload from pending to completed and add the file; of two concurrent requests, one wins."""
    upload = pending(session, project_id, upload_id)
    upload.status, upload.part_ids, upload.file_id = "completed", list(part_ids), file.id
    session.flush()
    quotas.check_file(session, file)
    files.add(session, file)
    condemn(session, upload)
    return upload


def record_cancellation(session: Session, project_id: str, upload_id: str) -> Upload:
    """Change the upload from pending to cancelled; its bytes are deleted after the commit."""
    upload = pending(session, project_id, upload_id)
    upload.status = "cancelled"
    session.flush()
    condemn(session, upload)
    return upload


def expire(session: Session) -> Sequence[Upload]:
    """Change overdue uploads from pending to expired; their bytes are deleted after the commit."""
    overdue = (Upload.status == "pending") & (Upload.expires_at <= timestamp())
    oldest = select(Upload.id).where(overdue).order_by(Upload.expires_at).limit(_SWEPT_AT_ONCE)
    ended = update(Upload).where(Upload.id.in_(oldest)).values(status="expired").returning(Upload)
    expired = session.scalars(ended).all()
    for upload in expired:
        condemn(session, upload)
    return expired


def condemn(session: Session, upload: Upload) -> None:
    """Schedule the bytes of an ended upload for deletion."""
    size = session.scalar(select(func.sum(UploadPart.bytes)).where(UploadPart.upload_id == upload.id)) or 0
    objects.condemn_prefix(session, folder(upload), project_id=upload.project_id, subject=upload.id, bytes=int(size))


def folder(upload: Upload) -> str:
    """Return the storage prefix of an upload's parts."""
    return f"tenants/{upload.project_id}/uploads/{upload.id}"


def receive_part(storage: Storage, begin: Begin, project_id: str, upload_id: str, form: Form) -> UploadPart:
    """Stream one part to storage and add it to its upload."""
    part = UploadPart(id=new_id("part_"), upload_id=upload_id)
    expected = form.most_bytes(PART_BYTES)

    def plan(session: Session) -> Sequence[PlannedObject]:
        upload = pending(session, project_id, upload_id)
        room = quotas.room_for_part(session, upload, expected)
        part.storage_key = f"{folder(upload)}/{part.id}"
        return [PlannedObject(part.storage_key, project_id, upload_id, room.bytes, room.limit)]

    with objects.writing(storage, begin, plan) as writing:
        part.bytes = writing.write(part.storage_key, _at_most(PART_BYTES, form.file())).bytes
        # Fields may follow the file, so they are checked after it.
        if form.fields:
            name = min(form.fields)[:64]
            raise InvalidRequest(f"The field {name!r} is unknown.", code="extra_forbidden", param=name)
        with begin() as session:
            writing.keep(session, part.storage_key)
            return add_part(session, project_id, part)


def complete(
    storage: Storage, begin: Begin, project_id: str, upload_id: str, ask: UploadComplete, limits: Limits
) -> UploadOut:
    """Assemble the file from its parts and validate it like any other file.

    A repeated request returns the existing file. Raises `InvalidRequest` if parts, size or MD5 do not match.
    """
    with begin() as session:
        done = find_completed(session, project_id, upload_id, ask)
        if done is None:
            upload = pending(session, project_id, upload_id)
            parts = chosen_parts(session, upload, ask.part_ids)
    if done is None:
        done = _complete(storage, begin, upload, parts, ask, limits)
    objects.perform(storage, begin, upload_id)
    return _upload_response(*done)


def cancel(storage: Storage, begin: Begin, project_id: str, upload_id: str) -> Upload:
    """Cancel an upload; if its bytes could not be deleted, a repeated request tries again."""
    with begin() as session:
        upload = get(session, project_id, upload_id)
        if upload.status != "cancelled" or not objects.has_deletions(session, project_id, upload_id):
            upload = record_cancellation(session, project_id, upload_id)
    objects.perform(storage, begin, upload_id)
    return upload


def sweep(storage: Storage, begin: Begin) -> None:
    """Delete the bytes of uploads that were not completed in time."""
    with begin() as session:
        expired = expire(session)
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
    planned = [PlannedObject(key, upload.project_id, file_id)]
    with objects.writing(storage, begin, lambda session: planned) as writing:
        stored, report = write_checked(writing, key, chunks(), TrainingRows(), limits, upload.filename)
        if ask.md5 is not None and digest.hexdigest() != ask.md5.lower():
            message = f"The MD5 of the file is {digest.hexdigest()}, not {ask.md5.lower()}."
            raise InvalidRequest(message, code="md5_mismatch", param="md5")
        received = ReceivedFile(key, name_of_lines(upload.filename), stored, report)
        file = new_file(file_id, upload.project_id, received, limits, expires_at=_expiry(upload))
        with begin() as session:
            writing.keep(session, key)
            return record_completion(session, upload.project_id, upload.id, ask.part_ids, file), file


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
