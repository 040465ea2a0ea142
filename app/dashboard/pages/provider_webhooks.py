"""The provider's page of all projects' webhooks: endpoints, deliveries and their replay."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.dashboard.forms import NO_FAULTS, Faults, SentDep
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep, Viewer
from app.deps import AfterQuery, LookDep, ProviderBeginDep, ReadDep
from app.errors import AppError
from app.webhooks import service

router = APIRouter(include_in_schema=False, prefix="/provider/webhooks")

_AT_ONCE = 50
_STATES = ("pending", "delivered", "failed")


@router.get("")
def webhooks_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    status: Annotated[Literal["", "pending", "delivered", "failed"], Query()] = "",
    after: AfterQuery = None,
) -> Response:
    """List endpoints and deliveries."""
    return _page(request, viewer, session, status, after)


@router.post("/deliveries/{delivery_id}/replay")
def replay(delivery_id: str, request: Request, sent: SentDep, begin: ProviderBeginDep, look: LookDep) -> Response:
    """Send an event again."""
    try:
        with begin() as session:
            service.replay_any(session, delivery_id)
    except AppError as error:
        with look() as session:
            return _page(request, sent.viewer, session, error=error)
    return RedirectResponse("/provider/webhooks", 303)


def _page(
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
        endpoints=service.all_endpoints(session),
        deliveries=service.all_deliveries(session, status or None, after, _AT_ONCE),
        states=_STATES,
        wanted=status,
        faults=Faults.from_error(error) if error else NO_FAULTS,
    )
