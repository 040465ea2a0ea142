"""Count bytes that are being uploaded or wait for deletion; a quota counts them like the bytes of files."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import Session

from app.db.tables import ObjectIntent, Upload, UploadPart
from app.db.tables.objects import WRITE

_OPEN = Upload.status == "pending"


def pending(session: Session, project_id: str | None = None) -> Counter[str]:
    """Return the pending bytes by project, of one project or all.

    An upload in parts counts with its announced size, or with the size of its parts if that is larger.
    """
    found = Counter[str]()
    of_project = (Upload.project_id == project_id) if project_id else true()
    sent = sent_parts(session, of_project)
    query = select(Upload.id, Upload.project_id, Upload.bytes).where(_OPEN, of_project)
    for upload_id, owner, announced in session.execute(query):
        found[owner] += max(announced, sent[upload_id])
    # Parts that are being written are in `sent`, so their intents are not counted a second time.
    is_counted = (ObjectIntent.kind == WRITE) & ObjectIntent.subject.in_(select(Upload.id).where(_OPEN))
    is_owned = (ObjectIntent.project_id == project_id) if project_id else ObjectIntent.project_id.is_not(None)
    others = select(ObjectIntent.project_id, func.sum(ObjectIntent.bytes)).where(~is_counted, is_owned)
    for each, size in session.execute(others.group_by(ObjectIntent.project_id)):
        found[each or ""] += int(size)
    return found


def sent_parts(session: Session, which: ColumnElement[bool]) -> Counter[str]:
    """Return the bytes of each open upload's parts, including parts that are being written."""
    stored = select(UploadPart.upload_id, func.sum(UploadPart.bytes)).join(Upload, Upload.id == UploadPart.upload_id)
    coming = select(ObjectIntent.subject, func.sum(ObjectIntent.bytes)).join(Upload, Upload.id == ObjectIntent.subject)
    found = Counter[str]()
    for query in (
        stored.where(_OPEN, which).group_by(UploadPart.upload_id),
        coming.where(_OPEN, which, ObjectIntent.kind == WRITE).group_by(ObjectIntent.subject),
    ):
        for upload_id, size in session.execute(query):
            found[upload_id] += int(size)
    return found
