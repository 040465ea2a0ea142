"""Pages of jobs: the list, one job while it runs and after, its replies and transcripts, and several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.dashboard.one_job import OwnJobDep
from app.dashboard.rendering import job_name, page, short_id
from app.dashboard.viewer import FormViewerDep, Viewer, ViewerDep
from app.db.tables import JobStatus
from app.deps import AfterQuery, LimitsDep, LookDep, QuickStorageDep, ReadDep, SettingsDep, StorageDep
from app.errors import AppError, InvalidRequest
from app.jobs import clone, service
from app.jobs.clone import JobClone
from app.jobs.reports.comparison import compare_measures, differences, plot_losses, read_losses
from app.jobs.reports.gather import gather_reports, read
from app.jobs.service import Submission, add_file_names

router = APIRouter(include_in_schema=False)

_AT_ONCE = 50
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
    return _list(request, viewer, session, search.strip(), wanted, after)


def _list(
    request: Request,
    viewer: Viewer,
    session: Session,
    search: str = "",
    wanted: JobStatus | None = None,
    after: str | None = None,
    problem: AppError | None = None,
) -> Response:
    """Render the list; `problem` is the error of a failed comparison."""
    found = service.search_jobs(session, viewer.project_id, search, wanted, after, _AT_ONCE)
    add_file_names(session, found.data)
    name = "jobs_rows" if request.headers.get("hx-target") == "jobs" else "jobs"
    shown = {"jobs": found, "search": search, "wanted": wanted, "statuses": list(JobStatus), "problem": problem}
    shown["base_url"] = f"{request.base_url}v1"
    return page(request, name, viewer, status=problem.status if problem else 200, **shown)


@router.get("/jobs/{job_id}")
async def job_page(job: OwnJobDep) -> Response:
    """Show one job: verdict, audit results, training, rows, files and events."""
    return await job.answer(job.page)


@router.get("/jobs/{job_id}/risky-rows/{line}")
async def risky_row(line: int, job: OwnJobDep) -> Response:
    """Show the text of a risky row; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.risky_row, line))


@router.get("/compare")
async def compare_page(
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    storage: QuickStorageDep,
    ids: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI's own way
) -> Response:
    """Show two to four jobs side by side; for another number, show the list again with an error."""

    def compare_jobs() -> Response:
        if not 2 <= len(set(ids)) <= _COMPARED:
            problem = InvalidRequest(f"Choose two to {_COMPARED} jobs to compare.", param="ids")
            with look() as session:
                return _list(request, viewer, session, problem=problem)
        with look() as session:
            gathered = gather_reports(session, viewer.project_id, list(dict.fromkeys(ids)))
            losses = read_losses(session, [each.job.id for each in gathered])
        seen = [read(storage, each) for each in gathered]
        names = {each.job.id: f"{job_name(each.job)} ({short_id(each.job.id)})" for each in seen}
        return page(
            request,
            "compare",
            viewer,
            jobs=[(each.job, each.view()) for each in seen],
            differing=differences([each.job for each in seen]),
            measures=list(compare_measures([(each.job, each.report) for each in seen])),
            losses=plot_losses(names, losses),
        )

    return await viewer.lanes.reads.project_share(viewer.project_id).run(compare_jobs)


@router.post("/jobs/{job_id}/again")
async def again(
    viewer: FormViewerDep, job: OwnJobDep, storage: StorageDep, settings: SettingsDep, limits: LimitsDep
) -> Response:
    """Clone a job on a new file without the rows that its report calls risky."""
    ask, submission = JobClone(without_risky_rows=True), Submission(None, 0)

    def clone_job() -> Response:
        try:
            made = clone.clone(storage, job.begin, viewer.principal, job.job_id, ask, submission, settings, limits)
        except AppError as error:
            return job.page(error)
        return RedirectResponse(f"/jobs/{made.id}", 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(clone_job)


_ACTS: Mapping[str, Callable[[Session, str, str], object]] = {
    "cancel": service.cancel,
    "cancel-with-audit": partial(service.cancel, audit_last=True),
    "pause": service.pause,
    "resume": service.resume,
}


@router.post("/jobs/{job_id}/{act}")
async def change_job(
    act: Literal["cancel", "cancel-with-audit", "pause", "resume"], viewer: FormViewerDep, job: OwnJobDep
) -> Response:
    """Cancel, pause or resume a job; on its page, say if that failed."""

    def perform() -> Response:
        try:
            with job.begin() as session:
                _ACTS[act](session, viewer.project_id, job.job_id)
        except AppError as error:
            return job.page(error)
        return RedirectResponse(job.address, 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(perform)


# Show both models' replies to the customer's own requests: a part of the job's page, and a separate page.


@router.get("/jobs/{job_id}/task-replies")
async def task_replies(job: OwnJobDep) -> Response:
    """Show each request with both replies."""
    return await job.answer(job.task_replies)


# Pages of a job's transcripts: a list without texts, and each prompt with its reply on a page of its own.


@router.get("/jobs/{job_id}/transcripts")
async def transcripts_page(job: OwnJobDep, after: Annotated[int, Query(ge=0, le=2**31)] = 0, hit: str = "") -> Response:
    """List the transcripts by suite and outcome, without their texts."""
    return await job.answer(partial(job.transcripts, after, hit))


@router.get("/jobs/{job_id}/transcripts/{index}")
async def transcript(index: int, job: OwnJobDep) -> Response:
    """Show one prompt and its reply; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.transcript, index))
