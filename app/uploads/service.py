"""Uploads as rows: begun, added to, ended; every query is within one tenant."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app.db import timestamp
from app.errors import InvalidRequest, InvalidState, NotFound, TooLarge
from app.files import service as files
from app.files.upload import check_purpose, clean_name
from app.models import File, utc_now
from app.quotas import service as quotas
from app.uploads.models import Upload, UploadPart
from app.uploads.schemas import UploadComplete, UploadCreate

_LIVES = timedelta(hours=1)
_SWEPT_AT_ONCE = 100
_SENDINGS = 3  # a client may send a part again, twice


def create(session: Session, tenant_id: str, ask: UploadCreate, max_bytes: int) -> Upload:
    """Begin an upload, which has an hour to be completed in."""
    check_purpose(ask.purpose)
    if ask.bytes > max_bytes:
        raise TooLarge(f"An upload has at most {max_bytes} bytes.", param="bytes")
    upload = Upload(
        tenant_id=tenant_id,
        filename=clean_name(ask.filename, "filename"),
        purpose=ask.purpose,
        bytes=ask.bytes,
        expires_at=utc_now() + _LIVES,
        file_expires_after_s=ask.expires_after.seconds if ask.expires_after else None,
    )
    session.add(upload)
    session.flush()
    return upload


def get(session: Session, tenant_id: str, upload_id: str) -> Upload:
    """The tenant's upload, locked; somebody else's reads as unknown."""
    query = select(Upload).where(Upload.tenant_id == tenant_id, Upload.id == upload_id).with_for_update()
    upload = session.scalar(query)
    if upload is None:
        raise NotFound(f"No such Upload object: {upload_id}", code="upload_not_found", param="upload_id")
    return upload


def pending(session: Session, tenant_id: str, upload_id: str) -> Upload:
    """The same, if it still takes parts."""
    upload = get(session, tenant_id, upload_id)
    if upload.status == "pending" and upload.expires_at <= utc_now():
        raise InvalidState(f"{upload.id} has expired; begin a new upload.", code="upload_expired")
    if upload.status != "pending":
        raise InvalidState(f"{upload.id} is {upload.status}; begin a new upload.")
    return upload


def add_part(session: Session, tenant_id: str, part: UploadPart) -> UploadPart:
    """Note a part that is in storage."""
    upload = pending(session, tenant_id, part.upload_id)
    earlier = session.scalar(select(func.sum(UploadPart.bytes)).where(UploadPart.upload_id == upload.id)) or 0
    if earlier + part.bytes > _SENDINGS * upload.bytes:
        message = f"The parts have far more than the {upload.bytes} bytes that were announced."
        raise TooLarge(message, code="too_many_parts", param="data")
    session.add(part)
    session.flush()
    return part


def chosen_parts(session: Session, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
    """The parts in the order asked for, which together must have the bytes that were announced."""
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


def completed(session: Session, tenant_id: str, upload_id: str, ask: UploadComplete) -> tuple[Upload, File] | None:
    """What an earlier sending of the same request has made."""
    upload = get(session, tenant_id, upload_id)
    file = session.get(File, upload.file_id) if upload.file_id else None
    return (upload, file) if file is not None and upload.part_ids == ask.part_ids else None


def complete(session: Session, tenant_id: str, upload_id: str, part_ids: Sequence[str], file: File) -> Upload:
    """pending -> completed, with the file that came of it; won by one of two that try at once."""
    upload = pending(session, tenant_id, upload_id)
    quotas.check_file(session, file)
    upload.status, upload.part_ids, upload.file_id = "completed", list(part_ids), file.id
    files.add(session, file)
    return upload


def cancel(session: Session, tenant_id: str, upload_id: str) -> Upload:
    """pending -> cancelled; the caller removes the bytes after the commit."""
    upload = pending(session, tenant_id, upload_id)
    upload.status = "cancelled"
    session.flush()
    return upload


def expire(session: Session) -> Sequence[Upload]:
    """pending -> expired for those whose hour is over; the caller removes their bytes after the commit."""
    overdue = (Upload.status == "pending") & (Upload.expires_at <= timestamp())
    oldest = select(Upload.id).where(overdue).order_by(Upload.expires_at).limit(_SWEPT_AT_ONCE)
    ended = update(Upload).where(Upload.id.in_(oldest)).values(status="expired").returning(Upload)
    return session.scalars(ended).all()
