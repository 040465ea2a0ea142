"""The provider's overview: workers, queue and open decisions; and the jobs of all projects."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.catalog.checklist import checklist
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep
from app.db.tables import JobStatus
from app.deps import AfterQuery, ReadDep, SettingsDep
from app.jobs import fleet, service
from app.jobs.service import add_file_names

router = APIRouter(include_in_schema=False, prefix="/provider")

_AT_ONCE = 50


@router.get("")
def fleet_page(request: Request, viewer: ProviderDep, session: ReadDep, settings: SettingsDep) -> Response:
    """Show what is left to set up, the workers with their GPUs, the queue by project, and open decisions."""
    return page(
        request,
        "provider_fleet",
        viewer,
        workers=fleet.workers(session),
        queue=fleet.queue(session),
        undecided=fleet.count_undecided(session),
        points=checklist(session, settings),
    )


@router.get("/jobs")
def jobs_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    search: Annotated[str, Query(max_length=128)] = "",
    status: Annotated[JobStatus | str, Query(max_length=32)] = "",
    project: Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{0,64}$")] = "",
    after: AfterQuery = None,
) -> Response:
    """List the jobs of all projects, with filter and search."""
    wanted = JobStatus(status) if status in set(JobStatus) else None
    found = service.search_jobs(session, project or None, search, wanted, after, _AT_ONCE)
    add_file_names(session, found.data)
    return page(
        request,
        "provider_jobs_rows" if "hx-request" in request.headers else "provider_jobs",
        viewer,
        jobs=found,
        search=search,
        wanted=wanted,
        project=project,
        statuses=[each for each in JobStatus if each != JobStatus.validating_files],
    )
