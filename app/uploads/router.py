"""OpenAI's upload endpoints: a large file in parts."""

from __future__ import annotations

from fastapi import APIRouter, BackgroundTasks

from app.deps import (
    PART_FORM,
    BeginDep,
    CustomerDep,
    MultipartLimitsDep,
    PartFormDep,
    SessionDep,
    StorageDep,
)
from app.uploads import parts, service
from app.uploads.models import Upload, UploadPart
from app.uploads.schemas import PartOut, UploadComplete, UploadCreate, UploadOut

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])


@router.post("", response_model=UploadOut)
def create_upload(
    ask: UploadCreate,
    session: SessionDep,
    caller: CustomerDep,
    limits: MultipartLimitsDep,
    storage: StorageDep,
    begin: BeginDep,
    after: BackgroundTasks,
) -> Upload:
    """Announce a file that will come in parts."""
    after.add_task(parts.sweep, storage, begin)
    return service.create(session, caller.tenant_id, ask, limits.bytes)


@router.post("/{upload_id}/parts", response_model=PartOut, openapi_extra=PART_FORM)
def add_part(
    upload_id: str, caller: CustomerDep, form: PartFormDep, storage: StorageDep, begin: BeginDep
) -> UploadPart:
    """Send one part of at most 64 MB; parts may be sent at the same time."""
    return parts.receive_part(storage, begin, caller.tenant_id, upload_id, form)


@router.post("/{upload_id}/complete", response_model=UploadOut)
def complete_upload(
    upload_id: str,
    ask: UploadComplete,
    caller: CustomerDep,
    storage: StorageDep,
    begin: BeginDep,
    limits: MultipartLimitsDep,
) -> UploadOut:
    """Make a file of the parts, in the order of `part_ids`; it is checked as every file is."""
    return parts.complete(storage, begin, caller.tenant_id, upload_id, ask, limits)


@router.post("/{upload_id}/cancel", response_model=UploadOut)
def cancel_upload(
    upload_id: str, session: SessionDep, caller: CustomerDep, storage: StorageDep, after: BackgroundTasks
) -> Upload:
    """Give an upload up."""
    upload = service.cancel(session, caller.tenant_id, upload_id)
    after.add_task(storage.delete_prefix, parts.folder(upload))  # runs after the commit
    return upload
