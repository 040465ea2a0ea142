"""What our words and the error codes mean; without signing in, since they are what the documentation says too."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from app.dashboard.rendering import page
from app.dashboard.viewer import VisitorDep
from app.help import CODES_PLACE, PLACES, TERMS_PLACE, codes, sections

router = APIRouter(include_in_schema=False)


@router.get("/help")
def help_page() -> Response:
    """Redirect to the words."""
    return RedirectResponse(TERMS_PLACE, 303)


@router.get(TERMS_PLACE)
def terms_page(request: Request, viewer: VisitorDep) -> Response:
    """Explain each of our words."""
    return page(request, "help_terms", viewer, sections=sections())


@router.get(CODES_PLACE)
def errors_page(request: Request, viewer: VisitorDep) -> Response:
    """Give the cause and the cure of each error code."""
    return page(request, "help_errors", viewer, codes=codes(), places=PLACES)
