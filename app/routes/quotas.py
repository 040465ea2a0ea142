"""Projects, for the provider: create, limit, report usage."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query

from app.deps import AdminDep, ProviderSessionDep, ReadDep
from app.quotas import service
from app.quotas.schemas import ProjectCreate, ProjectList, ProjectOut, QuotaSet, UsageList

router = APIRouter(prefix="/v1/admin", tags=["provider"])

Unix = Annotated[int, Query(ge=0, le=253_402_300_799)]  # until the year 9999


@router.get("/projects", response_model=ProjectList)
def list_projects(session: ReadDep, caller: AdminDep) -> ProjectList:
    """List all projects with their limits."""
    return ProjectList(data=service.projects(session))


@router.post("/projects", response_model=ProjectOut)
def create_project(ask: ProjectCreate, session: ProviderSessionDep, caller: AdminDep) -> ProjectOut:
    """Create a project, without limits and without a key."""
    return service.create_project(session, ask.name)


@router.get("/projects/{project_id}", response_model=ProjectOut)
def retrieve_project(project_id: str, session: ReadDep, caller: AdminDep) -> ProjectOut:
    """Return one project with its limits."""
    return service.project(session, project_id)


@router.post("/projects/{project_id}/quota", response_model=ProjectOut)
def set_quota(project_id: str, ask: QuotaSet, session: ProviderSessionDep, caller: AdminDep) -> ProjectOut:
    """Set a project's limits; they replace all previous ones."""
    return service.set_quota(session, project_id, ask)


@router.get("/usage", response_model=UsageList)
def list_usage(session: ReadDep, caller: AdminDep, start_time: Unix = 0, end_time: Unix = 253_402_300_799) -> UsageList:
    """List each project's usage by jobs created in a period, erased ones included, and its current storage."""
    since, until = (datetime.fromtimestamp(at, UTC) for at in (start_time, end_time))
    return UsageList(data=service.usage(session, since, until))
