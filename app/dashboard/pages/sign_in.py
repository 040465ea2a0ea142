"""Sign-in and sign-out, and the static files of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import RedirectResponse, Response

from app import keys
from app.callers import recognize_key
from app.dashboard import rendering
from app.dashboard.rendering import page
from app.dashboard.viewer import LeavingViewerDep, check_origin
from app.deps import BeginDep, CallerDep, EngineDep, SettingsDep
from app.errors import AppError

router = APIRouter(include_in_schema=False)

_HOME = "/jobs"


@router.get("/")
def home() -> Response:
    """Redirect to the jobs."""
    return RedirectResponse(_HOME, 303)


@router.get("/static/{name}")
async def static(name: str, request: Request) -> Response:
    """Return a style sheet or a script, cacheable forever because its name contains its digest.

    Only these files are compressed: they hold no secret whose length could tell something (BREACH), as pages do.
    """
    found = rendering.find_asset(name)
    headers = {
        "cache-control": "public, max-age=31536000, immutable",
        "vary": "accept-encoding",
        "x-content-type-options": "nosniff",
    }
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.content, media_type=found.media_type, headers=headers)
    return Response(found.gzipped, media_type=found.media_type, headers=headers | {"content-encoding": "gzip"})


@router.get("/sign-in")
def sign_in_page(request: Request, next: str = _HOME) -> Response:
    """Show the form that asks for a key."""
    return page(request, "sign_in", next=_own_path(next), error=None)


async def _sign_in_form(request: Request) -> Mapping[str, object]:
    return await request.form(max_files=0, max_fields=8)


@router.post("/sign-in")
def sign_in(
    request: Request,
    form: Annotated[Mapping[str, object], Depends(_sign_in_form)],
    engine: EngineDep,
    settings: SettingsDep,
    caller: CallerDep,
    begin: BeginDep,
) -> Response:
    """Check a key and set a session cookie for it."""
    secret, going = str(form.get("key", "")).strip(), _own_path(str(form.get("next", "")))
    try:
        check_origin(request)
        principal = recognize_key(request, engine, settings, caller, secret)
    except AppError as error:
        return page(request, "sign_in", status=error.status, next=going, error=error)
    with begin() as session:
        cookie = keys.begin_session(session, principal)
    home = "/provider" if principal.scopes == {"admin"} else _HOME
    answer: Response
    if going.startswith("/v1/"):  # most likely a download, which leaves the browser on the sign-in page
        answer = page(request, "signed_in", going=going, home=home)
    else:
        answer = RedirectResponse(home if going == _HOME else going, 303)
    answer.set_cookie(
        keys.COOKIE,
        cookie,
        max_age=int(keys.SESSION_LIFETIME.total_seconds()),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/sign-out")
def sign_out(request: Request, viewer: LeavingViewerDep, begin: BeginDep) -> Response:
    """End the browser session and delete its cookie."""
    with begin() as session:
        keys.end_session(session, request.cookies[keys.COOKIE])
    answer = RedirectResponse("/sign-in", 303)
    answer.delete_cookie(keys.COOKIE)
    return answer


def _own_path(path: str) -> str:
    """Return `path` if it is a path of this site, else the home page, so that no redirect leads to another site."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_own else _HOME
