"""OpenAI's upload endpoints: a large file in parts."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, BackgroundTasks

from app.db.tables import Upload, UploadPart
from app.deps import (
    BeginDep,
    CustomerDep,
    MultipartLimitsDep,
    SessionDep,
    StorageDep,
    WritesDep,
)
from app.forms import PartFormDep
from app.http.openapi import PART_FORM
from app.uploads import parts, service
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
    writes: WritesDep,
    after: BackgroundTasks,
) -> Upload:
    """Begin an upload of a file in parts."""
    after.add_task(writes.finish, parts.sweep, storage, begin)
    return service.create(session, caller.project_id, ask, limits.bytes)


@router.post("/{upload_id}/parts", response_model=PartOut, openapi_extra=PART_FORM)
async def add_part(
    upload_id: str, caller: CustomerDep, form: PartFormDep, storage: StorageDep, begin: BeginDep, writes: WritesDep
) -> UploadPart:
    """Send one part of at most 64 MB; parts may be sent in parallel."""
    return await writes.run(partial(parts.receive_part, storage, begin, caller.project_id, upload_id, form))


@router.post("/{upload_id}/complete", response_model=UploadOut)
async def complete_upload(
    upload_id: str,
    ask: UploadComplete,
    caller: CustomerDep,
    storage: StorageDep,
    begin: BeginDep,
    limits: MultipartLimitsDep,
    writes: WritesDep,
) -> UploadOut:
    """Create the file from its parts, in the order of `part_ids`; it is validated like any other file."""
    return await writes.run(partial(parts.complete, storage, begin, caller.project_id, upload_id, ask, limits))


@router.post("/{upload_id}/cancel", response_model=UploadOut)
async def cancel_upload(
    upload_id: str, caller: CustomerDep, storage: StorageDep, begin: BeginDep, writes: WritesDep
) -> Upload:
    """Cancel an upload."""
    return await writes.run(partial(parts.cancel, storage, begin, caller.project_id, upload_id))
