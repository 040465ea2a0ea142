"""Serve `/docs` and `/redoc` with scripts from the package fastapi-offline, so that no other host is needed.

The pages are functions of this module, not closures over an app: FastAPI caches every function it has called, and with
it everything that the function references.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

_FILES = "/static-offline-docs"
_ICON = "/favicon.png"
_HEADERS = {  # both pages contain an inline script, so scripts cannot be forbidden
    "content-security-policy": "frame-ancestors 'none'; object-src 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}

router = APIRouter(include_in_schema=False)


@router.get("/docs")
def swagger(request: Request) -> HTMLResponse:
    """Show every call with its fields, and let the reader try calls."""
    root, app = request.scope.get("root_path", ""), request.app
    found = get_swagger_ui_html(
        openapi_url=f"{root}{app.openapi_url}",
        title=f"{app.title} - Swagger UI",
        swagger_js_url=f"{root}{_FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{root}{_FILES}/swagger-ui.css",
        swagger_favicon_url=f"{root}{_FILES}{_ICON}",
    )
    found.headers.update(_HEADERS)
    return found


@router.get("/redoc")
def redoc(request: Request) -> HTMLResponse:
    """Show every call with its fields, for reading."""
    root, app = request.scope.get("root_path", ""), request.app
    found = get_redoc_html(
        openapi_url=f"{root}{app.openapi_url}",
        title=f"{app.title} - ReDoc",
        redoc_js_url=f"{root}{_FILES}/redoc.standalone.js",
        redoc_favicon_url=f"{root}{_FILES}{_ICON}",
        with_google_fonts=False,
    )
    found.headers.update(_HEADERS)
    return found


def mount_files(app: FastAPI) -> None:
    """Serve the scripts and styles of both pages."""
    app.mount(_FILES, StaticFiles(packages=[("fastapi_offline", "static")]), name="static-offline-docs")
