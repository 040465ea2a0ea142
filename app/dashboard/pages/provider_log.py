"""The provider's pages of the audit log: its entries, and the verification of its hash chain."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import Response

from app.audit_log import service
from app.audit_log.schemas import VerificationOut
from app.dashboard.rendering import page
from app.dashboard.viewer import ProviderDep, Viewer
from app.deps import LookDep, ReadDep

router = APIRouter(include_in_schema=False, prefix="/provider/audit-log")

_AT_ONCE = 50


@router.get("")
def log_page(
    request: Request,
    viewer: ProviderDep,
    session: ReadDep,
    action: Annotated[str, Query(pattern=r"^([a-z_]+\.[a-z_]+)?$", max_length=64)] = "",
    after: Annotated[int | None, Query(ge=1, le=2**62)] = None,
) -> Response:
    """Show a page of the log, newest first."""
    return _page(request, viewer, session, action, after)


@router.get("/verification")
async def verification_page(request: Request, viewer: ProviderDep, look: LookDep) -> Response:
    """Recompute the hash chain, and show the log with the result."""
    reads = viewer.lanes.reads.project_share(viewer.project_id)
    found = await reads.run(partial(service.verification, look))

    def show_verification() -> Response:
        with look() as session:
            return _page(request, viewer, session, verified=found)

    return await reads.run(show_verification)


def _page(
    request: Request,
    viewer: Viewer,
    session: Session,
    action: str = "",
    after: int | None = None,
    verified: VerificationOut | None = None,
) -> Response:
    found = service.entries(session, action or None, after, _AT_ONCE)
    return page(request, "provider_log", viewer, entries=found, action=action, verified=verified)
