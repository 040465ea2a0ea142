"""The provider's overview, the jobs of all projects, their webhooks, and the audit log with its verification.

Also the projects: create them, set limits, create keys, whose secret is shown once, and revoke them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app import audit_log, db, keys, quotas
from app.audit_log import VerificationOut
from app.catalog.checklist import checklist
from app.dashboard.one_job import AnyJobDep
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, ProviderDep, SentDep, SubmittedForm, Viewer
from app.db.tables import JobStatus
from app.deps import AfterQuery, LookDep, ProviderBeginDep, ReadDep, SettingsDep
from app.errors import AppError
from app.http.validation_errors import read
from app.jobs import fleet
from app.jobs import service as jobs
from app.jobs.service import add_file_names
from app.keys import KeyCreate, is_good
from app.quotas import ProjectCreate, QuotaSet
from app.webhooks import service as webhooks

router = APIRouter(include_in_schema=False, prefix="/provider")
_AT_ONCE = 50
one_job = APIRouter(include_in_schema=False, prefix="/provider/jobs/{job_id}")
webhook_pages = APIRouter(include_in_schema=False, prefix="/provider/webhooks")
_DELIVERY_STATES = ("pending", "delivered", "failed")
log_pages = APIRouter(include_in_schema=False, prefix="/provider/audit-log")
project_pages = APIRouter(include_in_schema=False, prefix="/provider/projects")


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
        projects=quotas.project_names(session, [project, *(job.organization_id for job in found.data)]),
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
    endpoints = webhooks.all_endpoints(session)
    return page(
        request,
        "provider_webhooks",
        viewer,
        status=error.status if error else 200,
        endpoints=endpoints,
        projects=quotas.project_names(session, [each.project_id for each in endpoints]),
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


_LIMITS = {
    "max_file_bytes": "Bytes of training files",
    "max_file_rows": "Rows of training files",
    "max_jobs_per_day": "Jobs in 24 hours",
    "max_unfinished_jobs": "Jobs that have not ended",
    "max_gpu_seconds": "GPU seconds in 30 days",
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "max_tokens_per_day": "Tokens in 24 hours",
    "weight": "Weight of its turns on the GPUs",
}
_SCOPES = ("customer", "read", "admin")
_DAY_S = 86_400


@project_pages.get("")
def projects_page(request: Request, viewer: ProviderDep, session: ReadDep) -> Response:
    """List the projects."""
    return _list_projects(request, viewer, session)


@project_pages.post("")
def create_project(request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Create a project from the form and show the list; a refused form is shown again with its faults."""
    try:
        ask = read(ProjectCreate, sent.filled_fields("name"))
        with begin() as session:
            made = quotas.create_project(session, ask.name)
    except AppError as error:
        with look() as session:
            return _list_projects(request, sent.viewer, session, sent.text("name"), error)
    return RedirectResponse(f"/provider/projects/{made.id}", 303)


@project_pages.get("/{project_id}")
def project_page(project_id: str, request: Request, viewer: ProviderDep, session: ReadDep) -> Response:
    """Show a project's limits and keys."""
    return _show_project(request, viewer, session, project_id)


@project_pages.post("/{project_id}/quota")
def set_quota(project_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Set a project's limits; an empty field means no limit."""
    try:
        ask = read(QuotaSet, sent.filled_fields(*_LIMITS))
        with begin() as session:
            quotas.set_quota(session, project_id, ask)
    except AppError as error:
        return _show_fault(request, sent, look, project_id, error)
    return RedirectResponse(f"/provider/projects/{project_id}", 303)


@project_pages.post("/{project_id}/keys")
def create_key(project_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Create a key and show its secret, this once."""
    viewer, asked = sent.viewer, sent.filled_fields("name", "owner")
    try:
        days = sent.text("expires_in_days")
        body = asked | {"project_id": project_id, "scopes": sent.texts("scopes")}
        body |= {"expires_in_s": int(days) * _DAY_S if days.isdecimal() else days} if days else {}
        ask = read(KeyCreate, body)
        with begin() as session:
            _, secret = keys.issue_key(session, viewer.principal, ask)
    except AppError as error:
        return _show_fault(request, sent, look, project_id, error)
    with look() as session:
        return _show_project(request, viewer, session, project_id, secret=secret)


@project_pages.post("/{project_id}/keys/{key_id}/revoke")
def revoke_key(
    project_id: str, key_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep
) -> Response:
    """Revoke a key at once."""
    try:
        with begin() as session:
            keys.revoke_key(session, key_id)
    except AppError as error:
        return _show_fault(request, sent, look, project_id, error)
    return RedirectResponse(f"/provider/projects/{project_id}", 303)


def _show_fault(request: Request, sent: SubmittedForm, look: LookDep, project_id: str, error: AppError) -> Response:
    with look() as session:
        return _show_project(request, sent.viewer, session, project_id, asked=sent, error=error)


def _list_projects(
    request: Request, viewer: Viewer, session: Session, name: str = "", error: AppError | None = None
) -> Response:
    return page(
        request,
        "provider_projects",
        viewer,
        status=error.status if error else 200,
        projects=quotas.projects(session),
        limits=_LIMITS,
        asked_name=name,
        faults=Faults.from_error(error) if error else NO_FAULTS,
    )


def _show_project(
    request: Request,
    viewer: Viewer,
    session: Session,
    project_id: str,
    *,
    asked: SubmittedForm | None = None,
    error: AppError | None = None,
    secret: str | None = None,
) -> Response:
    found, now = keys.list_keys(session, project_id), db.clock(session)
    return page(
        request,
        "provider_project",
        viewer,
        status=error.status if error else 200,
        project=quotas.project(session, project_id),
        keys=[(key, is_good(key, now)) for key in reversed(found)],
        limits=_LIMITS,
        scopes=_SCOPES,
        asked=asked,
        secret=secret,
        faults=Faults.from_error(error) if error else NO_FAULTS,
    )
