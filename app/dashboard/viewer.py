"""The viewer of a page: a browser that is signed in with a key. Also the checks of its scopes and forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import Depends, Request

from app.audit_log import service as audit_log
from app.callers import signed_in_browser
from app.deps import BeginDep, CallerDep, EngineDep, SettingsDep
from app.errors import Forbidden, Unauthorized
from app.http.lanes import Lanes
from app.keys import browser_sessions
from app.keys.service import Principal


class SignInNeeded(Unauthorized):
    """The browser is not signed in; `location` is the sign-in page that leads back to `path`."""

    def __init__(self, path: str) -> None:
        super().__init__("Sign in first.")
        self.location = f"/sign-in?next={quote(path, safe='')}"


@dataclass(frozen=True, slots=True)
class Viewer:
    """A signed-in browser; `form_token` is the CSRF token of its forms."""

    principal: Principal
    form_token: str
    lanes: Lanes

    @property
    def project_id(self) -> str:
        """The project of the viewer's key."""
        return self.principal.project_id

    @property
    def is_provider(self) -> bool:
        """Return True if the key has the scope `admin`."""
        return "admin" in self.principal.scopes

    @property
    def may_read(self) -> bool:
        """Return True if the key may read the project's own data."""
        return not self.principal.scopes.isdisjoint({"customer", "read"})

    @property
    def may_write(self) -> bool:
        """Return True if the key may change the project's own data."""
        return "customer" in self.principal.scopes


def check_origin(request: Request) -> None:
    """Raise Forbidden for a form that another site has sent (cross-site request forgery).

    Browsers report the origin in `Sec-Fetch-Site`, older ones in `Origin`. A client that sends neither is not a
    browser, so no other site can make it send a form.
    """
    if request.method in ("GET", "HEAD"):
        return
    # `Sec-Fetch-Site: none` means that the user started the request, for example from the address bar.
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    hosts = {request.headers.get(name, "").lower() for name in ("host", "x-forwarded-host")} - {""}
    is_own = site in ("same-origin", "none") if site else origin is None or urlsplit(origin).netloc.lower() in hosts
    if not is_own:
        raise Forbidden("Send this form from its own page, not from another site.", code="stale_form")


def _signed_in_viewer(request: Request, engine: EngineDep, settings: SettingsDep, caller: CallerDep) -> Viewer:
    check_origin(request)
    principal = signed_in_browser(request, engine, settings, caller)
    if principal is None:
        raise SignInNeeded(_address(request))
    cookie = request.cookies[browser_sessions.COOKIE]
    viewer = Viewer(principal, browser_sessions.form_token(cookie), request.app.state.lanes)
    request.state.viewer = viewer  # so that error pages can show the navigation
    return viewer


SignedInDep = Annotated[Viewer, Depends(_signed_in_viewer)]


def _viewer(viewer: SignedInDep) -> Viewer:
    if not viewer.may_read:
        raise Forbidden("This key has neither the scope customer nor read, which the pages need.")
    return viewer


def _provider(viewer: SignedInDep, request: Request, begin: BeginDep) -> Viewer:
    """Require the scope `admin`; as in the API, an attempt without it is recorded in the audit log."""
    if not viewer.is_provider:
        with begin() as session:
            audit_log.record(session, "admin.denied", f"{request.method} {request.scope['route'].path}", "denied")
        raise Forbidden("This page needs a key with the scope admin.")
    return viewer


def _address(request: Request) -> str:
    """Return where to go after signing in: the requested page, or the jobs if a form was sent."""
    if request.method != "GET":
        return "/jobs"
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def sign_in_redirect(request: Request, error: Exception) -> SignInNeeded | None:
    """Return a redirect to the sign-in page for a browser that opens a link without being signed in; else None.

    API clients, which send an `Authorization` header, get their error unchanged.
    """
    if isinstance(error, SignInNeeded):
        return error
    is_link = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    is_client = "authorization" in request.headers
    is_sent = isinstance(error, Unauthorized) and is_link and not is_client
    return SignInNeeded(_address(request)) if is_sent else None


ViewerDep = Annotated[Viewer, Depends(_viewer)]
ProviderDep = Annotated[Viewer, Depends(_provider)]


def check_token(viewer: Viewer, token: str) -> None:
    """Raise Forbidden unless a form's token is this browser session's."""
    if not browser_sessions.is_same(viewer.form_token, token):
        raise Forbidden("This form is not from this page, or the page is too old; load it again.", code="stale_form")


def check_form(viewer: Viewer, token: str) -> None:
    """Raise Forbidden unless a form's token is this session's and the viewer may write."""
    check_token(viewer, token)
    if not viewer.may_write:
        raise Forbidden('This key lacks the scope "customer", which this needs.')


async def _form_viewer(request: Request, viewer: ViewerDep) -> Viewer:
    form = await request.form(max_files=0, max_fields=64)
    check_form(viewer, str(form.get("form_token", "")))
    return viewer


async def _leaving_viewer(request: Request, viewer: SignedInDep) -> Viewer:
    form = await request.form(max_files=0, max_fields=8)
    check_token(viewer, str(form.get("form_token", "")))
    return viewer


# For pages that change something: the dependency checks the form's token before the page's code runs.
FormViewerDep = Annotated[Viewer, Depends(_form_viewer)]
LeavingViewerDep = Annotated[Viewer, Depends(_leaving_viewer)]  # without a check of scopes: anybody may sign out
