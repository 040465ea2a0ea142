"""Jobs: the list, one job as it goes and as it ended, several side by side."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from app.audit_log import service as audit_log
from app.dashboard.rendering import page
from app.dashboard.viewer import FormViewerDep, ViewerDep
from app.db.tables import TERMINAL, JobStatus
from app.deps import (
    AfterQuery,
    BeginDep,
    LimitsDep,
    LookDep,
    QuickStorageDep,
    ReadDep,
    SessionDep,
    SettingsDep,
    StorageDep,
)
from app.errors import InvalidRequest, NotFound
from app.jobs import clone, service
from app.jobs.clone import JobClone
from app.jobs.reports.gather import gather, read
from app.jobs.reports.service import read_report
from app.jobs.submissions import Submission

router = APIRouter(include_in_schema=False)

_AT_ONCE = 50
_EVENTS = 100
_COMPARED = 4


@router.get("/jobs")
def jobs_page(
    request: Request,
    viewer: ViewerDep,
    session: ReadDep,
    after: AfterQuery = None,
    status: str = "",
    search: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """List the project's jobs, newest first."""
    wanted = JobStatus(status) if status in set(JobStatus) else None
    found = service.search_jobs(session, viewer.project_id, search.strip(), wanted, after, _AT_ONCE)
    name = "jobs_rows" if request.headers.get("hx-target") == "jobs" else "jobs"
    return page(request, name, viewer, jobs=found, search=search, wanted=wanted, statuses=list(JobStatus))


@router.get("/jobs/{job_id}")
async def job_page(
    job_id: str, request: Request, viewer: ViewerDep, look: LookDep, storage: QuickStorageDep
) -> Response:
    """Show one job: the verdict, what was measured, how it was trained, its rows, its files, its events."""

    def shown() -> Response:
        with look() as session:
            gathered = gather(session, viewer.project_id, job_id)
            events = service.latest_messages(session, viewer.project_id, job_id, _EVENTS)
        seen = read(storage, gathered)
        name = "job_live" if "hx-request" in request.headers else "job"
        return page(
            request,
            name,
            viewer,
            job=seen.job,
            is_over=seen.job.status in TERMINAL,
            report=seen.report,
            view=seen.view(),
            events=events,
            artifacts=seen.artifacts,
            findings=seen.findings,
            risky=len(clone.risky_lines(seen.report)) if seen.report else 0,
        )

    return await viewer.lanes.reads.of(viewer.project_id).run(shown)


@router.get("/jobs/{job_id}/risky-rows/{line}")
async def risky_row(
    job_id: str,
    line: int,
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    begin: BeginDep,
    storage: QuickStorageDep,
) -> Response:
    """Show the text of a row that looks like harm; that it was looked at is logged."""

    def shown() -> Response:
        with look() as session:
            _, key = service.reported(session, viewer.project_id, job_id)
        row = next((row for row in read_report(storage, key).risky_rows or () if row.line == line), None)
        if row is None:
            raise NotFound("No such row in the report of this job.")
        with begin() as session:
            audit_log.record(session, "risky_row.shown", job_id, line=line)
        return page(request, "risky_row", viewer, job_id=job_id, row=row)

    return await viewer.lanes.reads.of(viewer.project_id).run(shown)


@router.post("/jobs/{job_id}/again")
async def again(
    job_id: str,
    viewer: FormViewerDep,
    begin: BeginDep,
    storage: StorageDep,
    settings: SettingsDep,
    limits: LimitsDep,
) -> Response:
    """Start the same job on a new file without the rows that its report calls risky."""
    ask, submission = JobClone(without_risky_rows=True), Submission(None, 0)

    def cloned() -> Response:
        made = clone.clone(storage, begin, viewer.principal, job_id, ask, submission, settings, limits)
        return RedirectResponse(f"/jobs/{made.id}", 303)

    return await viewer.lanes.writes.of(viewer.project_id).run(cloned)


@router.get("/compare")
async def compare_page(
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    storage: QuickStorageDep,
    ids: Annotated[list[str], Query(max_length=_COMPARED)] = [],  # noqa: B006 - FastAPI's own way
) -> Response:
    """Show two to four jobs side by side."""

    def shown() -> Response:
        if not 2 <= len(set(ids)) <= _COMPARED:
            raise InvalidRequest(f"Choose two to {_COMPARED} jobs to compare.", param="ids")
        with look() as session:
            gathered = [gather(session, viewer.project_id, job_id) for job_id in dict.fromkeys(ids)]
        seen = [read(storage, each) for each in gathered]
        return page(request, "compare", viewer, jobs=[(each.job, each.view()) for each in seen])

    return await viewer.lanes.reads.of(viewer.project_id).run(shown)


@router.post("/jobs/{job_id}/cancel")
def cancel(job_id: str, viewer: FormViewerDep, session: SessionDep) -> Response:
    """Cancel a job."""
    service.cancel(session, viewer.project_id, job_id)
    return RedirectResponse(f"/jobs/{job_id}", 303)


@router.post("/jobs/{job_id}/pause")
def pause(job_id: str, viewer: FormViewerDep, session: SessionDep) -> Response:
    """Pause a job."""
    service.pause(session, viewer.project_id, job_id)
    return RedirectResponse(f"/jobs/{job_id}", 303)


@router.post("/jobs/{job_id}/resume")
def resume(job_id: str, viewer: FormViewerDep, session: SessionDep) -> Response:
    """Let a paused job go on."""
    service.resume(session, viewer.project_id, job_id)
    return RedirectResponse(f"/jobs/{job_id}", 303)
