"""OpenAI's file objects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer, WithJsonSchema

UnixTime = Annotated[
    datetime, PlainSerializer(lambda at: int(at.timestamp()), return_type=int), WithJsonSchema({"type": "integer"})
]


class FileOut(BaseModel):
    """An uploaded or produced file."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: UnixTime
    expires_at: UnixTime | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FileList(BaseModel):
    """One page of files, newest first unless asked otherwise."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[FileOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Validation(BaseModel):
    """Every problem of a file, by line."""

    object: Literal["file.validation"] = "file.validation"
    file_id: str
    status: str
    rows: int | None
    counts: dict[str, int]
    problems: list[dict[str, Any]]
