"""OpenAI's checkpoint endpoints. Weights of checkpoints were not audited and are never served."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from app.checkpoints import service
from app.checkpoints.models import CheckpointPermission
from app.checkpoints.schemas import CheckpointList, PermissionCreate, PermissionDeleted, PermissionList
from app.deps import AdminDep, AfterQuery, CustomerDep, ReadDep, SessionDep
from app.pages import Page

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
    """The steps of a training that were kept, with their numbers, the latest first."""
    return service.list_checkpoints(session, caller.tenant_id, job_id, after, limit)


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
    """Which projects may know of a checkpoint."""
    return service.list_permissions(
        session, caller.tenant_id, model, project_id, after, limit, ascending=order == "ascending"
    )


@permissions.post("/{model:path}/permissions", response_model=PermissionList)
def create_permissions(
    model: str, ask: PermissionCreate, session: SessionDep, caller: AdminDep
) -> Page[CheckpointPermission]:
    """Let projects of your organisation know of a checkpoint."""
    return service.permit(session, caller.tenant_id, model, ask.project_ids)


@permissions.delete("/{model:path}/permissions/{permission_id}", response_model=PermissionDeleted)
def delete_permission(model: str, permission_id: str, session: SessionDep, caller: AdminDep) -> PermissionDeleted:
    """Withdraw a permission."""
    return PermissionDeleted(id=service.withdraw(session, caller.tenant_id, model, permission_id).id)
