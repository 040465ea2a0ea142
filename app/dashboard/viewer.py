"""The viewer of a page: a browser that is signed in with a key. Also the checks of its scopes and forms.

Each submitted form has a CSRF token that is checked; validation messages belong to the form's fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import Depends, Request
from starlette.datastructures import FormData

from app import audit_log, keys
from app.callers import signed_in_browser
from app.deps import BeginDep, CallerDep, EngineDep, SettingsDep
from app.errors import AppError, Forbidden, Unauthorized
from app.http.lanes import Lanes
from app.keys import Principal


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


def _visitor(request: Request, engine: EngineDep, settings: SettingsDep, caller: CallerDep) -> Viewer | None:
    principal = signed_in_browser(request, engine, settings, caller)
    if principal is None:
        return None
    return Viewer(principal, keys.form_token(request.cookies[keys.COOKIE]), request.app.state.lanes)


VisitorDep = Annotated[Viewer | None, Depends(_visitor)]  # for pages that everybody may read


def _signed_in_viewer(request: Request, engine: EngineDep, settings: SettingsDep, caller: CallerDep) -> Viewer:
    check_origin(request)
    viewer = _visitor(request, engine, settings, caller)
    if viewer is None:
        raise SignInNeeded(_address(request))
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
    if not keys.is_same_token(viewer.form_token, token):
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


@dataclass(frozen=True, slots=True)
class SubmittedForm:
    """A submitted form and the viewer who has sent it."""

    viewer: Viewer
    form: FormData

    def text(self, name: str) -> str:
        """Return a field's text, stripped; "" if it is empty or missing."""
        return str(self.form.get(name, "")).strip()

    def texts(self, name: str) -> list[str]:
        """Return all values of a field with several."""
        return [str(each) for each in self.form.getlist(name)]

    def filled_fields(self, *names: str) -> dict[str, object]:
        """Return the given fields that are not empty, by name."""
        return {name: text for name in names if (text := self.text(name))}

    def shown_fields(self) -> dict[str, str]:
        """Return all fields except the token, to fill in the form again."""
        return {name: str(value) for name, value in self.form.items() if name != "form_token"}


async def _read_form(request: Request, viewer: ProviderDep) -> SubmittedForm:
    form = await request.form(max_files=0, max_fields=256)
    check_token(viewer, str(form.get("form_token", "")))
    return SubmittedForm(viewer, form)


# For provider pages that change something: the dependency checks the form's token before the page's code runs.
SentDep = Annotated[SubmittedForm, Depends(_read_form)]


@dataclass(frozen=True, slots=True)
class Faults:
    """The messages for a rejected form, by field name (the form's or the API's), and the overall `message`.

    It is falsy if there are none.
    """

    by_field: Mapping[str, str] = field(default_factory=dict)
    message: str = ""

    @classmethod
    def from_error(cls, error: AppError) -> Faults:
        """Return an error's messages by the API's field names."""
        found = {}
        for each in error.details or ():
            if isinstance(param := each.get("param"), str):
                found[param] = str(each["message"])
        return cls(found or ({error.param: error.message} if error.param else {}), error.message)

    def __bool__(self) -> bool:
        return bool(self.by_field or self.message)

    @property
    def rest(self) -> str:
        """The message to show above the form, if no field has one."""
        return "" if self.by_field else self.message

    def find(self, name: str) -> str:
        """Return the message for a field or for a part of it, as `name.part`; "" if there is none."""
        return next((said for param, said in self.by_field.items() if _concerns(param, name)), "")

    def elsewhere(self, names: Collection[str]) -> str:
        """Return the overall message, or "" if one of these fields shows a message already."""
        is_shown = any(_concerns(param, name) for param in self.by_field for name in names)
        return "" if is_shown else self.message


NO_FAULTS = Faults()


def form_faults(error: AppError, names: Collection[str], aliases: Mapping[str, str] | None = None) -> Faults:
    """Return an API error's messages by the form's field names.

    The last part of the API's dotted `param` that is one of `names` is the field; `aliases` map parts that have another
    name on the form.
    """
    found: dict[str, str] = {}
    for fault in error.details or ():
        name = _field(str(fault.get("param") or ""), names, aliases or {})
        if name and isinstance(fault.get("message"), str):
            found.setdefault(name, str(fault["message"]))
    name = _field(error.param or "", names, aliases or {})
    if name:
        found.setdefault(name, error.message)
    return Faults(found, error.message)


def _field(param: str, names: Collection[str], aliases: Mapping[str, str]) -> str | None:
    for part in reversed(param.split(".")):
        name = aliases.get(part, part)
        if name in names:
            return name
    return None


def _concerns(param: str, name: str) -> bool:
    return param == name or param.startswith(f"{name}.")
