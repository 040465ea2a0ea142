"""Manage uploads as rows: create, add parts, end; every query is limited to one project."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app import db, objects
from app.db import timestamp
from app.db.tables import File, Upload, UploadPart
from app.errors import InvalidRequest, InvalidState, NotFound, TooLarge
from app.files import service as files
from app.files.upload import check_purpose, clean_name
from app.quotas import service as quotas
from app.uploads.schemas import UploadComplete, UploadCreate

_LIVES = timedelta(hours=1)
_SWEPT_AT_ONCE = 100
_SENDINGS = 3  # a client may send a part again, twice


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


def complete(session: Session, project_id: str, upload_id: str, part_ids: Sequence[str], file: File) -> Upload:
    """Change the upload from pending to completed and add the file; of two concurrent requests, one wins."""
    upload = pending(session, project_id, upload_id)
    upload.status, upload.part_ids, upload.file_id = "completed", list(part_ids), file.id
    session.flush()
    quotas.check_file(session, file)
    files.add(session, file)
    condemn(session, upload)
    return upload


def cancel(session: Session, project_id: str, upload_id: str) -> Upload:
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
