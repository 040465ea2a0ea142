"""OpenAI's file endpoints, and the list of what is wrong in a file."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Literal

from fastapi import APIRouter, BackgroundTasks, Depends, Query, Request
from starlette.responses import Response

from app.deps import (
    FILE_FORM,
    AfterQuery,
    BeginDep,
    CustomerDep,
    FormDep,
    LimitsDep,
    MultipartLimitsDep,
    ReadDep,
    SessionDep,
    SettingsDep,
    StorageDep,
)
from app.download import DOWNLOAD, download
from app.files import convert, findings, preview, service, upload
from app.files.schemas import Conversion, FileDeleted, FileList, FileOut, Preview, Validation
from app.models import File
from app.pages import Page

router = APIRouter(prefix="/v1/files", tags=["files"])

ModelQuery = Annotated[str | None, Query(min_length=1, max_length=128)]


@router.get("", response_model=FileList)
def list_files(
    session: ReadDep,
    caller: CustomerDep,
    purpose: Annotated[str | None, Query(pattern=r"^[a-z_-]{1,64}$")] = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Page[File]:
    """Your files."""
    return service.list_files(session, caller.tenant_id, purpose, after, limit, ascending=order == "asc")


@router.post("", response_model=FileOut, openapi_extra=FILE_FORM)
def create_file(caller: CustomerDep, form: FormDep, storage: StorageDep, limits: LimitsDep, begin: BeginDep) -> File:
    """Upload a training file; it is checked while it arrives, and `status` says what came of it."""
    return upload.upload(storage, begin, caller.tenant_id, form, limits)


@router.get("/{file_id}", response_model=FileOut)
def retrieve_file(file_id: str, session: ReadDep, caller: CustomerDep) -> File:
    """One file."""
    return service.get(session, caller.tenant_id, file_id)


@router.delete("/{file_id}", response_model=FileDeleted)
def delete_file(
    file_id: str, session: SessionDep, caller: CustomerDep, storage: StorageDep, after: BackgroundTasks
) -> File:
    """Delete a file that no unfinished job uses."""
    file = service.delete(session, caller.tenant_id, file_id)
    after.add_task(storage.delete, file.storage_key)  # runs after the commit
    return file


@router.get("/{file_id}/content", response_class=Response, responses=DOWNLOAD)
def retrieve_content(
    file_id: str, request: Request, session: ReadDep, caller: CustomerDep, storage: StorageDep, settings: SettingsDep
) -> Response:
    """The file's bytes."""
    file = service.get(session, caller.tenant_id, file_id)
    if settings.results_csv_base64 and service.is_metrics(file):
        return Response(b64encode(b"".join(storage.chunks(file.storage_key))), media_type="text/plain")
    return download(storage, file.storage_key, file.filename, file.sha256, request.headers, settings.download_url_ttl_s)


def _wish(
    model: ModelQuery = None,
    max_seq_length: Annotated[int | None, Query(ge=16, le=131_072)] = None,
    validation_file: Annotated[str | None, Query(max_length=64)] = None,
    audit: bool = False,
    after_line: Annotated[int | None, Query(ge=0, le=2**31)] = None,
) -> findings.Wish:
    return findings.Wish(model, max_seq_length, validation_file, audit, after_line)


@router.get("/{file_id}/validation", response_model=Validation)
def retrieve_validation(
    file_id: str,
    session: ReadDep,
    caller: CustomerDep,
    storage: StorageDep,
    limits: MultipartLimitsDep,
    wish: Annotated[findings.Wish, Depends(_wish)],
) -> Validation:
    """Every problem of the file, by line; with `model` its tokens, with `validation_file` the rows that both hold.

    With `audit`, for keys with the admin scope, the lines that hold prompts of the audit.
    """
    about = findings.subject(session, caller, file_id, wish)
    session.close()  # what follows may take seconds
    return findings.find(storage, about, wish, limits)


@router.get("/{file_id}/preview", response_model=Preview)
def preview_file(
    file_id: str,
    session: ReadDep,
    caller: CustomerDep,
    storage: StorageDep,
    model: Annotated[str, Query(min_length=1, max_length=128)],
    n: Annotated[int, Query(ge=1, le=20)] = 3,
) -> Preview:
    """What will be trained: the first rows as the model's template renders them, with the loss mask token by token."""
    file = service.get(session, caller.tenant_id, file_id)
    entry = preview.model_entry(session, model)
    session.close()
    return preview.preview(storage, file, entry, n)


@router.post("/{file_id}/convert", response_model=Conversion)
def convert_file(
    file_id: str, caller: CustomerDep, storage: StorageDep, limits: LimitsDep, begin: BeginDep, dry_run: bool = False
) -> Conversion:
    """Make a chat file of one in ShareGPT's or Alpaca's form; `dry_run` only shows the first rows."""
    with begin() as session:
        file = service.get(session, caller.tenant_id, file_id)
    return convert.look(storage, file) if dry_run else convert.convert(storage, begin, file, limits)
