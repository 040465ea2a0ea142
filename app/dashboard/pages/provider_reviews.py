"""The provider's pages for people's decisions about the results of jobs: waivers, and labels of replies.

Adapters that the gate held back are released by waivers, which are proposed, approved and ended here. Replies are
labeled one at a time, so that a judge can be measured on them.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app import db, keys, quotas, waivers
from app.dashboard.rendering import HEADERS, page
from app.dashboard.viewer import NO_FAULTS, Faults, ProviderDep, SentDep, SubmittedForm, Viewer
from app.db import Begin
from app.deps import AfterQuery, LookDep, ProviderBeginDep, QuickStorageDep, ReadDep, SettingsDep
from app.errors import AppError, InvalidRequest
from app.http.validation_errors import read
from app.jobs import reply_labels
from app.jobs.reply_labels import DrawCreate, LabelCreate
from app.waivers import WaiverCreate, held_adapters
from spard.evaluation.calibration.labeling import DRAWN, SCORES

waivers_router = APIRouter(include_in_schema=False, prefix="/provider/waivers")
_WAIVERS_PLACE = "/provider/waivers"
_AT_ONCE = 20
_MOST_PROPOSED = 100  # proposals shown that wait for approval
_USUAL_TERM = timedelta(days=30)
labels_router = APIRouter(include_in_schema=False, prefix="/provider/labels")
_LABELS_PLACE = "/provider/labels"
ReplyId = Annotated[str | None, Query(pattern=r"^reply_[0-9a-f]{1,64}$")]


@waivers_router.get("")
def waivers_page(request: Request, viewer: ProviderDep, session: ReadDep, after: AfterQuery = None) -> Response:
    """List the adapters that are held back, with the waivers of each."""
    return _waivers_page(request, viewer, session, after)


@waivers_router.post("/{job_id}/propose")
def propose(job_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Propose to release an adapter."""
    try:
        ask = read(WaiverCreate, {"reason": sent.text("reason"), "expires_at": _day_end(sent.text("expires_at"))})
        with begin() as session:
            waivers.propose(session, sent.viewer.principal, job_id, ask)
    except AppError as error:
        return _again(request, sent, look, job_id, error)
    return RedirectResponse(f"{_WAIVERS_PLACE}#{job_id}", 303)


@waivers_router.post("/{job_id}/{waiver_id}/approve")
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
            waivers.approve(session, sent.viewer.principal, job_id, waiver_id, settings)
    except AppError as error:
        return _again(request, sent, look, job_id, error)
    return RedirectResponse(f"{_WAIVERS_PLACE}#{job_id}", 303)


@waivers_router.post("/{job_id}/{waiver_id}/end")
def end(
    job_id: str, waiver_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep
) -> Response:
    """End a waiver, or withdraw a proposal."""
    try:
        with begin() as session:
            waivers.end(session, job_id, waiver_id)
    except AppError as error:
        return _again(request, sent, look, job_id, error)
    return RedirectResponse(f"{_WAIVERS_PLACE}#{job_id}", 303)


def _day_end(day: str) -> int:
    """Return the end of a day in UTC, in Unix seconds; raise InvalidRequest if `day` is not an ISO date."""
    try:
        found = date.fromisoformat(day)
    except ValueError:
        raise InvalidRequest("Give a day, such as 2027-01-31.", code="invalid_type", param="expires_at") from None
    return int(datetime.combine(found, time(23, 59, 59), UTC).timestamp())


def _again(request: Request, sent: SubmittedForm, look: LookDep, job_id: str, error: AppError) -> Response:
    with look() as session:
        return _waivers_page(request, sent.viewer, session, None, job_id, sent.shown_fields(), error)


def _waivers_page(
    request: Request,
    viewer: Viewer,
    session: Session,
    after: str | None,
    job_id: str | None = None,
    asked: dict[str, str] | None = None,
    error: AppError | None = None,
) -> Response:
    waiting = held_adapters(session, None, _MOST_PROPOSED, waiting=True).data if after is None else []
    held = held_adapters(session, after, _AT_ONCE, waiting=False)
    return page(
        request,
        "provider_waivers",
        viewer,
        status=error.status if error else 200,
        waiting=waiting,
        held=held,
        projects=quotas.project_names(session, [each.project_id for each in (*waiting, *held.data)]),
        people={key.id: key.owner or key.name for key in keys.list_keys(session, None)},
        usual=(db.clock(session) + _USUAL_TERM).date().isoformat(),
        of=job_id,
        asked=asked or {},
        faults=Faults.from_error(error) if error else NO_FAULTS,
        no_faults=NO_FAULTS,
    )


@labels_router.get("")
async def labels_page(
    request: Request,
    viewer: ProviderDep,
    look: LookDep,
    begin: ProviderBeginDep,
    storage: QuickStorageDep,
    model: Annotated[str, Query(max_length=128)] = "",
    settle: bool = False,
    after: Annotated[int, Query(ge=0, le=2**31)] = 0,
    reply: ReplyId = None,
) -> Response:
    """Show the next reply to label, or one on which people disagree, and how far the work is."""

    def show_page() -> Response:
        work = (
            reply_labels.show(begin, storage, viewer.principal, model, after, reply, settle=settle) if model else None
        )
        return _labels_page(request, viewer, look, model, work=work, settle=settle)

    return await viewer.lanes.reads.project_share(viewer.project_id).run(show_page)


@labels_router.post("")
async def draw(
    request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep, storage: QuickStorageDep
) -> Response:
    """Draw replies of a base model."""
    model = sent.text("model")

    def draw_replies() -> Response:
        try:
            reply_labels.draw(begin, storage, read(DrawCreate, sent.filled_fields("model", "count")))
        except AppError as error:
            return _labels_page(request, sent.viewer, look, model, count=sent.text("count"), error=error)
        return _redirect(model=model)

    return await sent.viewer.lanes.writes.project_share(sent.viewer.project_id).run(draw_replies)


@labels_router.post("/{reply_id}/score")
def score(reply_id: str, sent: SentDep, begin: ProviderBeginDep) -> Response:
    """Store a score and go on with the next reply."""
    settles = bool(sent.text("settles"))
    ask = read(LabelCreate, {"score": sent.text("score"), "settles": settles})
    with begin() as session:
        reply_labels.add_label(session, sent.viewer.principal, reply_id, ask)
    return _redirect(model=sent.text("model"), **({"settle": "true"} if settles else {}))


@labels_router.get("/export")
async def export(
    viewer: ProviderDep,
    begin: ProviderBeginDep,
    storage: QuickStorageDep,
    model: Annotated[str, Query(max_length=128)],
) -> Response:
    """Download the decided labels for `spard judge --labeled`."""
    work = partial(reply_labels.export, begin, storage, model)
    text = await viewer.lanes.reads.project_share(viewer.project_id).run(lambda: Response(work()))
    text.headers.update(HEADERS | {"content-disposition": 'attachment; filename="labels.jsonl"'})
    text.headers["content-type"] = "application/jsonl"
    return text


def _redirect(**query: str) -> Response:
    return RedirectResponse(f"{_LABELS_PLACE}?{urlencode(query)}", 303)


def _labels_page(
    request: Request,
    viewer: Viewer,
    look: Begin,
    model: str,
    *,
    work: reply_labels.LabelWork | None = None,
    settle: bool = False,
    count: str = str(DRAWN),
    error: AppError | None = None,
) -> Response:
    with look() as session:
        counts = reply_labels.drawn_counts(session)
        back = reply_labels.latest_label(session, viewer.principal, model) if work else None
        labeler = reply_labels.labeler_name(session, viewer.principal)
    return page(
        request,
        "provider_labels",
        viewer,
        status=error.status if error else 200,
        counts=counts,
        model=model,
        work=work,
        back=back,
        labeler=labeler,
        settle=settle,
        count=count,
        scores=SCORES,
        faults=Faults.from_error(error) if error else NO_FAULTS,
    )
