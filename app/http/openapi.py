"""Share routes between all applications of a process, and build their OpenAPI document with the errors of every route.

FastAPI builds the validators of all routes when an application first matches a request, which takes 1 s of CPU. Our
routes read what differs between applications from `request.app.state`, so all applications share one set of routes.
FastAPI's `dependency_overrides`, which also belong to an application, are looked up per request.

`/docs` and `/redoc` show the document, with scripts from the package fastapi-offline, so that no other host is needed.
The pages are functions of this module, not closures over an app: FastAPI caches every function it has called, and with
it everything that the function references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel
from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute
from starlette.staticfiles import StaticFiles

from app.http.lanes import hold_place


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None
    details: list[dict[str, object]] | None = None
    details_url: str | None = None


class ErrorOut(BaseModel):
    """An error in OpenAI's envelope, with RFC 9457's members beside it."""

    error: ErrorBody
    type: str
    title: str
    status: int
    detail: str
    instance: str


_MEANINGS = {
    400: "The request is invalid, or the resource's state does not allow it.",
    401: "The API key is missing or invalid.",
    403: "The API key lacks the required scope.",
    404: "Not found in your project.",
    408: "The body came too slowly.",
    413: "Too large.",
    415: "The format is not supported.",
    429: "A rate limit or quota is reached.",
    503: "A dependency of the service does not answer at the moment.",
    507: "The storage is full.",
}
_CONSTANTS = ("object", "deleted")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorOut} for status, text in _MEANINGS.items()
}

# The OpenAPI request body of a route that takes an upload.
_BINARY = {"type": "string", "format": "binary"}
_EXPIRY = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"type": "string", "enum": ["created_at"]},
        "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_FORM_SCHEMA = {"type": "object", "required": ["file"], "properties": {"file": _BINARY}}
_UPLOAD_SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": _BINARY,
        "purpose": {"type": "string", "enum": ["fine-tune"]},
        "expires_after": _EXPIRY,  # as expires_after[anchor] and expires_after[seconds]
    },
}


def _as_form(schema: Mapping[str, object], **encoding: object) -> dict[str, object]:
    content = {"schema": schema, "encoding": encoding} if encoding else {"schema": schema}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": content}}}


IMPORT_FORM = _as_form(_FORM_SCHEMA)
UPLOAD_FORM = _as_form(_UPLOAD_SCHEMA, expires_after={"style": "deepObject", "explode": True})

_PART_SCHEMA = {"type": "object", "required": ["data"], "properties": {"data": _BINARY}}
PART_FORM = _as_form(_PART_SCHEMA)


def document(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's document without the 422 responses, because an invalid request is a 400 here.

    Constant fields of answers are listed as required, so that generated clients do not treat them as optional.
    """
    if not app.openapi_schema:
        found = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            webhooks=app.webhooks.routes,
        )
        for verbs in [*found["paths"].values(), *found["webhooks"].values()]:
            for route in verbs.values():
                route["responses"].pop("422", None)
        for schema in found["components"]["schemas"].values():
            _require_constants(schema)
        app.openapi_schema = found
    return app.openapi_schema


def _require_constants(schema: dict[str, Any]) -> None:
    """Require `object` and `deleted`, which are always sent although they have a default in Python."""
    properties = schema.get("properties", {})
    constants = [name for name in _CONSTANTS if "const" in properties.get(name, {})]
    if constants:
        schema["required"] = [*(name for name in properties if name in {*schema.get("required", ()), *constants})]


# Build routes once for all applications of a process.

_Overrides = dict[Callable[..., Any], Callable[..., Any]]
serving_app: ContextVar[FastAPI] = ContextVar("serving")  # the application whose request the current task answers


class _OverridesOfRequest:
    """Provides FastAPI with the dependency overrides of the current request's application."""

    @property
    def dependency_overrides(self) -> _Overrides:
        """The dependency overrides of the application that received the request."""
        return serving_app.get().dependency_overrides


def share_routes(*routers: APIRouter) -> Sequence[BaseRoute]:
    """Return the routes of the routers, for the `routes` of any number of applications."""
    parent = APIRouter(
        responses=ERRORS,
        dependencies=[Depends(hold_place, scope="function")],  # released once the transaction has ended
        dependency_overrides_provider=_OverridesOfRequest(),
    )
    for router in routers:
        parent.include_router(router)
    return tuple(parent.routes)


def build_routes(routes: Sequence[BaseRoute]) -> None:
    """Build the routes now, so that the first request does not wait for it."""
    for _ in iter_route_contexts(routes):
        pass


# Show the document as pages.

_SCRIPTS = "/static-offline-docs"
_ICON = "/favicon.png"
_PAGE_HEADERS = {  # both pages contain an inline script, so scripts cannot be forbidden
    "content-security-policy": "frame-ancestors 'none'; object-src 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}

reference_pages = APIRouter(include_in_schema=False)


@reference_pages.get("/docs")
def show_swagger(request: Request) -> HTMLResponse:
    """Show every call with its fields, and let the reader try calls."""
    root, app = request.scope.get("root_path", ""), request.app
    found = get_swagger_ui_html(
        openapi_url=f"{root}{app.openapi_url}",
        title=f"{app.title} - Swagger UI",
        swagger_js_url=f"{root}{_SCRIPTS}/swagger-ui-bundle.js",
        swagger_css_url=f"{root}{_SCRIPTS}/swagger-ui.css",
        swagger_favicon_url=f"{root}{_SCRIPTS}{_ICON}",
    )
    found.headers.update(_PAGE_HEADERS)
    return found


@reference_pages.get("/redoc")
def show_redoc(request: Request) -> HTMLResponse:
    """Show every call with its fields, for reading."""
    root, app = request.scope.get("root_path", ""), request.app
    found = get_redoc_html(
        openapi_url=f"{root}{app.openapi_url}",
        title=f"{app.title} - ReDoc",
        redoc_js_url=f"{root}{_SCRIPTS}/redoc.standalone.js",
        redoc_favicon_url=f"{root}{_SCRIPTS}{_ICON}",
        with_google_fonts=False,
    )
    found.headers.update(_PAGE_HEADERS)
    return found


def mount_files(app: FastAPI) -> None:
    """Serve the scripts and styles of both pages."""
    app.mount(_SCRIPTS, StaticFiles(packages=[("fastapi_offline", "static")]), name="static-offline-docs")
