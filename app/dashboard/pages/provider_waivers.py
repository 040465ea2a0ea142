"""The provider's page of adapters that the gate held back: propose, approve and end waivers."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app import db
from app.dashboard.forms import NO_FAULTS, Faults, Sent, SentDep
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep, Viewer
from app.deps import AfterQuery, LookDep, ProviderBeginDep, ReadDep, SettingsDep
from app.errors import AppError, InvalidRequest
from app.http.validation_errors import read
from app.keys import admin as keys
from app.waivers import service
from app.waivers.schemas import WaiverCreate
from app.waivers.service import held_adapters

router = APIRouter(include_in_schema=False, prefix="/provider/waivers")

_PLACE = "/provider/waivers"
_AT_ONCE = 20
_MOST = 100  # proposals shown that wait for approval
_USUAL = timedelta(days=30)


@router.get("")
def waivers_page(request: Request, viewer: ProviderDep, session: ReadDep, after: AfterQuery = None) -> Response:
    """List the adapters that are held back, with the waivers of each."""
    return _page(request, viewer, session, after)


@router.post("/{job_id}/propose")
def propose(job_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Propose to release an adapter."""
    try:
        ask = read(WaiverCreate, {"reason": sent.text("reason"), "expires_at": _day_end(sent.text("expires_at"))})
        with begin() as session:
            service.propose(session, sent.viewer.principal, job_id, ask)
    except AppError as error:
        return _again(request, sent, look, job_id, error)
    return RedirectResponse(f"{_PLACE}#{job_id}", 303)


@router.post("/{job_id}/{waiver_id}/approve")
def approve(
    job_id: str,
    waiver_id: str,
    request: Request,
    sent: SentDep,
    begin: ProviderBeginDep,
    look: LookDep,
    settings: SettingsDep,
) -> Response:
    """Approve another admin's proposal."""
    try:
        with begin() as session:
            service.approve(session, sent.viewer.principal, job_id, waiver_id, settings)
    except AppError as error:
        return _again(request, sent, look, job_id, error)
    return RedirectResponse(f"{_PLACE}#{job_id}", 303)


@router.post("/{job_id}/{waiver_id}/end")
def end(
    job_id: str, waiver_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep
) -> Response:
    """End a waiver, or withdraw a proposal."""
    try:
        with begin() as session:
            service.end(session, job_id, waiver_id)
    except AppError as error:
        return _again(request, sent, look, job_id, error)
    return RedirectResponse(f"{_PLACE}#{job_id}", 303)


def _day_end(day: str) -> int:
    """Return the end of a day in UTC, in Unix seconds; raise InvalidRequest if `day` is not an ISO date."""
    try:
        found = date.fromisoformat(day)
    except ValueError:
        raise InvalidRequest("Give a day, such as 2027-01-31.", code="invalid_type", param="expires_at") from None
    return int(datetime.combine(found, time(23, 59, 59), UTC).timestamp())


def _again(request: Request, sent: Sent, look: LookDep, job_id: str, error: AppError) -> Response:
    with look() as session:
        return _page(request, sent.viewer, session, None, job_id, sent.shown_fields(), error)


def _page(
    request: Request,
    viewer: Viewer,
    session: Session,
    after: str | None,
    job_id: str | None = None,
    asked: dict[str, str] | None = None,
    error: AppError | None = None,
) -> Response:
    return page(
        request,
        "provider_waivers",
        viewer,
        status=error.status if error else 200,
        waiting=held_adapters(session, None, _MOST, waiting=True).data if after is None else [],
        held=held_adapters(session, after, _AT_ONCE, waiting=False),
        people={key.id: key.owner or key.name for key in keys.list_keys(session, None)},
        usual=(db.clock(session) + _USUAL).date().isoformat(),
        of=job_id,
        asked=asked or {},
        faults=Faults.from_error(error) if error else NO_FAULTS,
        no_faults=NO_FAULTS,
    )
