"""OpenAI's endpoints of files, and of uploads of large files in parts; file validation, previews and conversion."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Request
from pydantic import StringConstraints
from starlette.responses import Response

from app import uploads
from app.catalog import service as catalog
from app.db.tables import File, Upload, UploadPart
from app.deps import (
    AfterQuery,
    AnswersDep,
    BeginDep,
    CountersDep,
    CustomerDep,
    FormDep,
    LimitsDep,
    LookDep,
    MultipartLimitsDep,
    PartFormDep,
    PreviewsDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SessionDep,
    SettingsDep,
    StorageDep,
    WritesDep,
)
from app.files import preview, service, upload
from app.files.counting import Allowance
from app.files.schemas import Conversion, FileDeleted, FileList, FileOut, Preview, Validation
from app.http.download import DOWNLOAD, Attachment, download
from app.http.openapi import PART_FORM, UPLOAD_FORM
from app.http.pagination import Page
from app.jobs import erasure
from app.jobs.service import require_released
from app.uploads import PartOut, UploadComplete, UploadCreate, UploadOut

router = APIRouter(prefix="/v1/files", tags=["files"])
ModelQuery = Annotated[str | None, Query(min_length=1, max_length=128)]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
LeaveOutQuery = Annotated[Sequence[ColumnName], Query(max_length=64)]
uploads_router = APIRouter(prefix="/v1/uploads", tags=["uploads"])


@router.get("", response_model=FileList)
def list_files(
    session: ReadDep,
    caller: CustomerDep,
    purpose: Annotated[str | None, Query(pattern=r"^[a-z_-]{1,64}$")] = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Page[File]:
    """List your files."""
    return service.list_files(session, caller.project_id, purpose, after, limit, ascending=order == "asc")


@router.post("", response_model=FileOut, openapi_extra=UPLOAD_FORM)
async def create_file(
    caller: CustomerDep, form: FormDep, storage: StorageDep, limits: LimitsDep, begin: BeginDep, writes: WritesDep
) -> File:
    """Upload a training file; it is validated as it arrives, and `status` is the result."""
    return await writes.run(partial(upload.upload, storage, begin, caller.project_id, form, limits))


@router.get("/{file_id}", response_model=FileOut)
async def retrieve_file(file_id: str, answers: AnswersDep) -> Response:
    """Return one file."""
    return await answers.respond(lambda reader, caller: service.retrieve(reader, caller.project_id, file_id))


@router.delete("/{file_id}", response_model=FileDeleted)
async def delete_file(
    file_id: str, caller: CustomerDep, storage: StorageDep, begin: BeginDep, writes: WritesDep
) -> FileDeleted:
    """Delete a file that no unfinished job uses; a model's archive is deleted with the model."""
    return await writes.run(partial(erasure.delete_file, storage, begin, caller.project_id, file_id))


@router.get("/{file_id}/content", response_class=Response, responses=DOWNLOAD)
async def retrieve_content(
    file_id: str,
    request: Request,
    look: LookDep,
    begin: BeginDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    reads: ReadsDep,
) -> Response:
    """Return the file's bytes; a result file with an adapter follows the rules of the job's adapter route."""

    def content() -> Response:
        file = require_released(look, begin, caller, file_id)
        if settings.results_csv_base64 and service.is_metrics(file):
            return Response(b64encode(b"".join(storage.chunks(file.storage_key))), media_type="text/plain")
        bytes_of = Attachment(file.storage_key, file.filename, file.sha256)
        return download(storage, bytes_of, request.headers, settings.download_link_s(), reads)

    return await reads.run(content)


def _validation_query(
    model: ModelQuery = None,
    max_seq_length: Annotated[int | None, Query(ge=16, le=131_072)] = None,
    validation_file: Annotated[str | None, Query(max_length=64)] = None,
    audit: bool = False,
    after_line: Annotated[int | None, Query(ge=0, le=2**31)] = None,
) -> preview.ValidationQuery:
    return preview.ValidationQuery(model, max_seq_length, validation_file, audit, after_line)


@router.get("/{file_id}/validation", response_model=Validation)
async def retrieve_validation(
    file_id: str,
    request: Request,
    look: LookDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    limits: MultipartLimitsDep,
    settings: SettingsDep,
    counters: CountersDep,
    previews: PreviewsDep,
    query: Annotated[preview.ValidationQuery, Depends(_validation_query)],
) -> Response:
    """List every problem of the file by line.

    With `model` also token counts, with `validation_file` the rows that are in both files. With `audit`, for keys with
    the admin scope, the lines that contain prompts of the audit.
    """

    def report(is_gone: Callable[[], bool]) -> Validation:
        with look() as session:
            about = preview.validation_subject(session, caller, file_id, query, catalog.default_suites)
        allowance = Allowance(settings.counting_cpu_s, is_gone)
        return preview.extend_validation(storage, counters, about, query, limits, allowance)

    return await previews.answer_while(request, report)


@router.get("/{file_id}/preview", response_model=Preview)
async def preview_file(
    file_id: str,
    request: Request,
    look: LookDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    counters: CountersDep,
    previews: PreviewsDep,
    model: Annotated[str, Query(min_length=1, max_length=128)],
    n: Annotated[int, Query(ge=1, le=20)] = 3,
) -> Response:
    """Show the first rows as the model's template renders them for training, with the loss mask."""

    def read_preview(is_gone: Callable[[], bool]) -> Preview:
        with look() as session:
            file = service.get(session, caller.project_id, file_id)
            entry = preview.model_entry(session, model)
        return preview.preview(storage, counters, file, entry, n, Allowance(settings.counting_cpu_s, is_gone))

    return await previews.answer_while(request, read_preview)


@router.post("/{file_id}/convert", response_model=Conversion)
async def convert_file(
    file_id: str,
    caller: CustomerDep,
    storage: StorageDep,
    limits: LimitsDep,
    begin: BeginDep,
    writes: WritesDep,
    dry_run: bool = False,
    leave_out: LeaveOutQuery = (),
) -> Conversion:
    """Convert a file from ShareGPT's, Alpaca's or TRL's format to OpenAI's; `dry_run` only shows the first rows.

    A column without a place in OpenAI's format is an error that names it, unless `leave_out` names it.
    """

    def run_conversion() -> Conversion:
        with begin() as session:
            file = service.get(session, caller.project_id, file_id)
        if dry_run:
            return upload.preview_conversion(storage, file, leave_out)
        return upload.convert_file(storage, begin, file, limits, leave_out)

    return await writes.run(run_conversion)


@uploads_router.post("", response_model=UploadOut)
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
    after.add_task(writes.finish, uploads.sweep, storage, begin)
    return uploads.create(session, caller.project_id, ask, limits.bytes)


@uploads_router.post("/{upload_id}/parts", response_model=PartOut, openapi_extra=PART_FORM)
async def add_part(
    upload_id: str, caller: CustomerDep, form: PartFormDep, storage: StorageDep, begin: BeginDep, writes: WritesDep
) -> UploadPart:
    """Send one part of at most 64 MB; parts may be sent in parallel."""
    return await writes.run(partial(uploads.receive_part, storage, begin, caller.project_id, upload_id, form))


@uploads_router.post("/{upload_id}/complete", response_model=UploadOut)
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
    return await writes.run(partial(uploads.complete, storage, begin, caller.project_id, upload_id, ask, limits))


@uploads_router.post("/{upload_id}/cancel", response_model=UploadOut)
async def cancel_upload(
    upload_id: str, caller: CustomerDep, storage: StorageDep, begin: BeginDep, writes: WritesDep
) -> Upload:
    """End an unfinished upload and delete its parts; a repeated call changes nothing."""
    return await writes.run(partial(uploads.cancel, storage, begin, caller.project_id, upload_id))
