"""The OpenAPI document: what every route may answer beside its 200, and OpenAI's error envelope for all of it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None
    details: list[dict[str, Any]] | None = None
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
    400: "The request is not right, or the thing is not in a state that allows it.",
    401: "There is no key, or it is not valid.",
    403: "The key lacks the scope that this needs.",
    404: "Unknown, or not yours.",
    408: "The body came too slowly.",
    413: "Too large.",
    415: "Not a format that is read here.",
    429: "A rate or a quota is reached.",
    503: "Something that the service needs does not answer at the moment.",
    507: "The storage is full.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ErrorOut} for status, text in _MEANINGS.items()
}


def document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's own, without the 422 that it assumes: what is wrong with a request is a 400 here."""
    if not app.openapi_schema:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for verbs in found["paths"].values():
            for route in verbs.values():
                route["responses"].pop("422", None)
        app.openapi_schema = found
    return app.openapi_schema
