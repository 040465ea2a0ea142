"""The provider's overview, the jobs of all projects, their webhooks, and the audit log with its verification."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app import audit_log
from app.audit_log import VerificationOut
from app.catalog.checklist import checklist
from app.dashboard.one_job import AnyJobDep
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, ProviderDep, SentDep, Viewer
from app.db.tables import JobStatus
from app.deps import AfterQuery, LookDep, ProviderBeginDep, ReadDep, SettingsDep
from app.errors import AppError
from app.jobs import fleet
from app.jobs import service as jobs
from app.jobs.service import add_file_names
from app.webhooks import service as webhooks

router = APIRouter(include_in_schema=False, prefix="/provider")
_AT_ONCE = 50
one_job = APIRouter(include_in_schema=False, prefix="/provider/jobs/{job_id}")
webhook_pages = APIRouter(include_in_schema=False, prefix="/provider/webhooks")
_DELIVERY_STATES = ("pending", "delivered", "failed")
log_pages = APIRouter(include_in_schema=False, prefix="/provider/audit-log")


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
    found = jobs.search_jobs(session, project or None, search, wanted, after, _AT_ONCE)
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


@one_job.get("")
async def job_page(job: AnyJobDep) -> Response:
    """Show one job: verdict, audit results, training, rows and events."""
    return await job.answer(job.page)


@one_job.get("/risky-rows/{line}")
async def risky_row(line: int, job: AnyJobDep) -> Response:
    """Show the text of a risky row; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.risky_row, line))


@one_job.get("/transcripts")
async def transcripts_page(job: AnyJobDep, after: Annotated[int, Query(ge=0, le=2**31)] = 0, hit: str = "") -> Response:
    """List the transcripts by suite and outcome, without their texts."""
    return await job.answer(partial(job.transcripts, after, hit))


@one_job.get("/transcripts/{index}")
async def transcript(index: int, job: AnyJobDep) -> Response:
    """Show one prompt and its reply; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.transcript, index))


@webhook_pages.get("")
def webhooks_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    status: Annotated[Literal["", "pending", "delivered", "failed"], Query()] = "",
    after: AfterQuery = None,
) -> Response:
    """List endpoints and deliveries."""
    return _webhooks_page(request, viewer, session, status, after)


@webhook_pages.post("/deliveries/{delivery_id}/replay")
def replay(delivery_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Send an event again."""
    try:
        with begin() as session:
            webhooks.replay_any(session, delivery_id)
    except AppError as error:
        with look() as session:
            return _webhooks_page(request, sent.viewer, session, error=error)
    return RedirectResponse("/provider/webhooks", 303)


def _webhooks_page(
    request: Request,
    viewer: Viewer,
    session: Session,
    status: str = "",
    after: str | None = None,
    error: AppError | None = None,
) -> Response:
    return page(
        request,
        "provider_webhooks",
        viewer,
        status=error.status if error else 200,
        endpoints=webhooks.all_endpoints(session),
        deliveries=webhooks.all_deliveries(session, status or None, after, _AT_ONCE),
        states=_DELIVERY_STATES,
        wanted=status,
        faults=Faults.from_error(error) if error else NO_FAULTS,
    )


@log_pages.get("")
def log_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    action: Annotated[str, Query(pattern=r"^([a-z_]+\.[a-z_]+)?$", max_length=64)] = "",
    after: Annotated[int | None, Query(ge=1, le=2**62)] = None,
) -> Response:
    """Show a page of the log, newest first."""
    return _log_page(request, viewer, session, action, after)


@log_pages.get("/verification")
async def verification_page(request: Request, viewer: ProviderDep, look: LookDep) -> Response:
    """Recompute the hash chain, and show the log with the result."""
    reads = viewer.lanes.reads.project_share(viewer.project_id)
    found = await reads.run(partial(audit_log.verification, look))

    def show_verification() -> Response:
        with look() as session:
            return _log_page(request, viewer, session, verified=found)

    return await reads.run(show_verification)


def _log_page(
    request: Request,
    viewer: Viewer,
    session: Session,
    action: str = "",
    after: int | None = None,
    verified: VerificationOut | None = None,
) -> Response:
    found = audit_log.entries(session, action or None, after, _AT_ONCE)
    return page(request, "provider_log", viewer, entries=found, action=action, verified=verified)
