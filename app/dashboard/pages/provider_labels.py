"""The provider's page on which people label replies, one at a time, so that a judge can be measured on them."""

from __future__ import annotations

from functools import partial
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from app.dashboard.forms import NO_FAULTS, Faults, SentDep
from app.dashboard.rendering import HEADERS, page
from app.dashboard.viewer import ProviderDep, Viewer
from app.db import Begin
from app.deps import LookDep, ProviderBeginDep, QuickStorageDep
from app.errors import AppError
from app.http.validation_errors import read
from app.jobs import reply_labels
from app.jobs.reply_labels import DrawCreate, LabelCreate
from spard.evaluation.calibration.labeling import DRAWN, SCORES

router = APIRouter(include_in_schema=False, prefix="/provider/labels")

_PLACE = "/provider/labels"

ReplyId = Annotated[str | None, Query(pattern=r"^reply_[0-9a-f]{1,64}$")]


@router.get("")
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
        return _page(request, viewer, look, model, work=work, settle=settle)

    return await viewer.lanes.reads.project_share(viewer.project_id).run(show_page)


@router.post("")
async def draw(
    request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep, storage: QuickStorageDep
) -> Response:
    """Draw replies of a base model."""
    model = sent.text("model")

    def draw_replies() -> Response:
        try:
            reply_labels.draw(begin, storage, read(DrawCreate, sent.filled_fields("model", "count")))
        except AppError as error:
            return _page(request, sent.viewer, look, model, count=sent.text("count"), error=error)
        return _redirect(model=model)

    return await sent.viewer.lanes.writes.project_share(sent.viewer.project_id).run(draw_replies)


@router.post("/{reply_id}/score")
def score(reply_id: str, sent: SentDep, begin: ProviderBeginDep) -> Response:
    """Store a score and go on with the next reply."""
    settles = bool(sent.text("settles"))
    ask = read(LabelCreate, {"score": sent.text("score"), "settles": settles})
    with begin() as session:
        reply_labels.add_label(session, sent.viewer.principal, reply_id, ask)
    return _redirect(model=sent.text("model"), **({"settle": "true"} if settles else {}))


@router.get("/export")
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
    return RedirectResponse(f"{_PLACE}?{urlencode(query)}", 303)


def _page(
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
