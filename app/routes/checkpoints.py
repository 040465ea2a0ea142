"""OpenAI's checkpoint endpoints, and the archive of a checkpoint that passed its own audit."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.checkpoints import service
from app.checkpoints.schemas import CheckpointList, PermissionCreate, PermissionDeleted, PermissionList
from app.db.tables import CheckpointPermission
from app.deps import (
    AdminDep,
    AfterQuery,
    BeginDep,
    CustomerDep,
    ProviderSessionDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SettingsDep,
)
from app.http.download import DOWNLOAD, Attachment, download
from app.http.pagination import Page

of_jobs = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])
permissions = APIRouter(prefix="/v1/fine_tuning/checkpoints", tags=["checkpoints"])


@of_jobs.get("/{job_id}/checkpoints", response_model=CheckpointList)
def list_checkpoints(
    job_id: str,
    session: ReadDep,
    caller: CustomerDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
) -> CheckpointList:
    """List the checkpoints of the last three epochs with their metrics and audits, newest first."""
    return service.list_checkpoints(session, caller.project_id, job_id, after, limit)


@of_jobs.get("/{job_id}/checkpoints/{checkpoint_id}/adapter", response_class=Response, responses=DOWNLOAD)
async def retrieve_checkpoint_adapter(
    job_id: str,
    checkpoint_id: str,
    request: Request,
    begin: BeginDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    reads: ReadsDep,
) -> Response:
    """Return the adapter archive of a checkpoint that passed its audit, whether or not the job succeeded."""

    def archive() -> Response:
        with begin() as session:
            name, adapter = service.adapter(session, caller, job_id, checkpoint_id)
        bytes_of = Attachment(adapter["storage_key"], name, adapter["sha256"], "application/gzip")
        return download(storage, bytes_of, request.headers, settings.download_link_s(), reads)

    return await reads.run(archive)


@permissions.get("/{model:path}/permissions", response_model=PermissionList)
def list_permissions(
    model: str,
    session: ReadDep,
    caller: AdminDep,
    project_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    order: Literal["ascending", "descending"] = "descending",
) -> Page[CheckpointPermission]:
    """List the projects that may see a checkpoint."""
    return service.list_permissions(
        session, caller.project_id, model, project_id, after, limit, ascending=order == "ascending"
    )


@permissions.post("/{model:path}/permissions", response_model=PermissionList)
def create_permissions(
    model: str, ask: PermissionCreate, session: ProviderSessionDep, caller: AdminDep
) -> Page[CheckpointPermission]:
    """Allow projects of your organization to see a checkpoint."""
    return service.permit(session, caller.project_id, model, ask.project_ids)


@permissions.delete("/{model:path}/permissions/{permission_id}", response_model=PermissionDeleted)
def delete_permission(
    model: str, permission_id: str, session: ProviderSessionDep, caller: AdminDep
) -> PermissionDeleted:
    """Withdraw a permission."""
    return PermissionDeleted(id=service.withdraw(session, caller.project_id, model, permission_id).id)
