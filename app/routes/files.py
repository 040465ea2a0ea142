"""OpenAI's file endpoints, and file validation, previews and conversion."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import StringConstraints
from starlette.responses import Response

from app.catalog import service as catalog
from app.db.tables import File
from app.deps import (
    AfterQuery,
    AnswersDep,
    BeginDep,
    CountersDep,
    CustomerDep,
    LimitsDep,
    LookDep,
    MultipartLimitsDep,
    PreviewsDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SettingsDep,
    StorageDep,
    WritesDep,
)
from app.files import convert, preview, service, upload, validation_report
from app.files.counting import Allowance
from app.files.schemas import Conversion, FileDeleted, FileList, FileOut, Preview, Validation
from app.forms import FormDep
from app.http.download import DOWNLOAD, Attachment, download
from app.http.openapi import UPLOAD_FORM
from app.http.pagination import Page
from app.jobs import erasure
from app.jobs.service import require_released

router = APIRouter(prefix="/v1/files", tags=["files"])

ModelQuery = Annotated[str | None, Query(min_length=1, max_length=128)]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
LeaveOutQuery = Annotated[Sequence[ColumnName], Query(max_length=64)]


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
) -> validation_report.Wish:
    return validation_report.Wish(model, max_seq_length, validation_file, audit, after_line)


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
    wish: Annotated[validation_report.Wish, Depends(_validation_query)],
) -> Response:
    """List every problem of the file by line.

    With `model` also token counts, with `validation_file` the rows that are in both files. With `audit`, for keys with
    the admin scope, the lines that contain prompts of the audit.
    """

    def report(is_gone: Callable[[], bool]) -> Validation:
        with look() as session:
            about = validation_report.subject(session, caller, file_id, wish, catalog.default_suites)
        allowance = Allowance(settings.counting_cpu_s, is_gone)
        return validation_report.find(storage, counters, about, wish, limits, allowance)

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
            return convert.look(storage, file, leave_out)
        return convert.convert(storage, begin, file, limits, leave_out)

    return await writes.run(run_conversion)
