"""Workers, the queue and the jobs of all projects, for keys with the admin scope."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.db.tables import JobStatus
from app.deps import AdminDep, AfterQuery, ReadDep
from app.jobs import fleet, service
from app.jobs.fleet import QueueList, WorkerList
from app.jobs.schemas import JobList

router = APIRouter(prefix="/v1/admin", tags=["provider"])


@router.get("/workers", response_model=WorkerList)
def list_workers(session: ReadDep, caller: AdminDep) -> WorkerList:
    """List the workers with their GPUs, their current jobs, and reasons that keep them from taking jobs."""
    return WorkerList(data=fleet.workers(session))


@router.get("/queue", response_model=QueueList)
def list_queue(session: ReadDep, caller: AdminDep) -> QueueList:
    """List the projects with unfinished jobs, with their shares and turns."""
    return QueueList(data=fleet.queue(session))


@router.get("/jobs", response_model=JobList)
def list_all_jobs(
    session: ReadDep,
    caller: AdminDep,
    search: Annotated[str, Query(max_length=128)] = "",
    status: JobStatus | None = None,
    project_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JobList:
    """List the jobs of all projects, newest first; `search` matches ids, suffixes and models."""
    return service.search_jobs(session, project_id, search, status, after, limit)
