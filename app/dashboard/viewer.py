"""Who looks at a page: a browser that was signed in with a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request

from app.deps import CallerDep, EngineDep, SettingsDep, signed_in_browser
from app.errors import Forbidden, Unauthorized
from app.http.lanes import Lanes
from app.keys import browser_sessions
from app.keys.service import Principal


class SignInNeeded(Unauthorized):
    """A page was asked for by a browser that is not signed in; it is shown the page to do so."""

    def __init__(self, path: str) -> None:
        super().__init__("Sign in first.")
        self.location = f"/sign-in?next={quote(path, safe='')}"


@dataclass(frozen=True, slots=True)
class Viewer:
    """A browser that is signed in; `form_token` is what its forms carry."""

    principal: Principal
    form_token: str
    lanes: Lanes

    @property
    def project_id(self) -> str:
        """The project whose things are shown."""
        return self.principal.project_id

    @property
    def is_provider(self) -> bool:
        """Whether the key has the scope `admin`."""
        return "admin" in self.principal.scopes

    @property
    def may_write(self) -> bool:
        """Whether the key is for more than reading."""
        return "customer" in self.principal.scopes


def _viewer(request: Request, engine: EngineDep, settings: SettingsDep, caller: CallerDep) -> Viewer:
    principal = signed_in_browser(request, engine, settings, caller)
    if principal is None:
        raise SignInNeeded(_address(request))
    if not principal.scopes & {"customer", "read"}:
        raise Forbidden("This key has neither the scope customer nor read, which the pages need.")
    cookie = request.cookies[browser_sessions.COOKIE]
    return Viewer(principal, browser_sessions.form_token(cookie), request.app.state.lanes)


def _address(request: Request) -> str:
    """Return where to go after signing in: the page itself, or the one that its form was on."""
    if request.method != "GET":
        return "/jobs"
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


ViewerDep = Annotated[Viewer, Depends(_viewer)]


def check_form(viewer: Viewer, token: str) -> None:
    """Refuse what was not sent from one of our forms in this browser, or by a key that only reads."""
    if not browser_sessions.is_same(viewer.form_token, token):
        raise Forbidden("This form is not from this page, or the page is too old; load it again.", code="stale_form")
    if not viewer.may_write:
        raise Forbidden('This key lacks the scope "customer", which this needs.')


async def _form_viewer(request: Request, viewer: ViewerDep) -> Viewer:
    form = await request.form(max_files=0, max_fields=64)
    check_form(viewer, str(form.get("form_token", "")))
    return viewer


# For pages that change something: the form's token is checked before anything else is done.
FormViewerDep = Annotated[Viewer, Depends(_form_viewer)]
