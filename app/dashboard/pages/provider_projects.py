"""The provider's pages of projects: create them, set limits, create keys (whose secret is shown once), revoke them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app import db, keys, quotas
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, ProviderDep, Sent, SentDep, Viewer
from app.deps import LookDep, ProviderBeginDep, ReadDep
from app.errors import AppError
from app.http.validation_errors import read
from app.keys import KeyCreate, is_good
from app.quotas import ProjectCreate, QuotaSet

router = APIRouter(include_in_schema=False, prefix="/provider/projects")

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


@router.get("")
def projects_page(request: Request, viewer: ProviderDep, session: ReadDep) -> Response:
    """List the projects."""
    return _list(request, viewer, session)


@router.post("")
def create(request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Create a project."""
    try:
        ask = read(ProjectCreate, sent.filled_fields("name"))
        with begin() as session:
            made = quotas.create_project(session, ask.name)
    except AppError as error:
        with look() as session:
            return _list(request, sent.viewer, session, sent.text("name"), error)
    return RedirectResponse(f"/provider/projects/{made.id}", 303)


@router.get("/{project_id}")
def project_page(project_id: str, request: Request, viewer: ProviderDep, session: ReadDep) -> Response:
    """Show a project's limits and keys."""
    return _one(request, viewer, session, project_id)


@router.post("/{project_id}/quota")
def set_quota(project_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Set a project's limits; an empty field means no limit."""
    try:
        ask = read(QuotaSet, sent.filled_fields(*_LIMITS))
        with begin() as session:
            quotas.set_quota(session, project_id, ask)
    except AppError as error:
        return _again(request, sent, look, project_id, error)
    return RedirectResponse(f"/provider/projects/{project_id}", 303)


@router.post("/{project_id}/keys")
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
        return _again(request, sent, look, project_id, error)
    with look() as session:
        return _one(request, viewer, session, project_id, secret=secret)


@router.post("/{project_id}/keys/{key_id}/revoke")
def revoke(
    project_id: str, key_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep
) -> Response:
    """Revoke a key at once."""
    try:
        with begin() as session:
            keys.revoke_key(session, key_id)
    except AppError as error:
        return _again(request, sent, look, project_id, error)
    return RedirectResponse(f"/provider/projects/{project_id}", 303)


def _again(request: Request, sent: Sent, look: LookDep, project_id: str, error: AppError) -> Response:
    with look() as session:
        return _one(request, sent.viewer, session, project_id, asked=sent, error=error)


def _list(
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


def _one(
    request: Request,
    viewer: Viewer,
    session: Session,
    project_id: str,
    *,
    asked: Sent | None = None,
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
