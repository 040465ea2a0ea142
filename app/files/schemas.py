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


class TokenCounts(BaseModel):
    """Tokens of the file's first 10,000 rows under one base model; `histogram` counts rows by their longest length.

    A job fails on a row of more than `limit` tokens and on one without a token to learn; of either kind at most 100
    lines are named.
    """

    model: str
    rows: int
    rows_not_rendered: int
    total: int
    trained: int
    min: int
    max: int
    limit: int
    rows_over_limit: int
    lines_over_limit: list[int]
    histogram: dict[str, int]
    rows_without_loss: int
    lines_without_loss: list[int]


class Overlap(BaseModel):
    """Rows that stand in both files, among the first 10,000 of each; at most 100 lines are named."""

    validation_file: str
    rows: int
    lines: list[int]


class AuditOverlap(BaseModel):
    """How many prompts of the audit stand in the first 10,000 rows, and the lines that hold them, at most 100."""

    prompts: int
    lines: list[int]


class Validation(BaseModel):
    """Every problem of a file, by line, in lists of a thousand of each severity.

    Where there are more, the list goes on after line `next_after_line`. `tokens`, `overlap` and `audit_overlap` are
    there where they were asked for.
    """

    object: Literal["file.validation"] = "file.validation"
    file_id: str
    status: str
    rows: int | None
    counts: dict[str, int]
    problems: list[dict[str, Any]]
    next_after_line: int | None = None
    tokens: TokenCounts | None = None
    overlap: Overlap | None = None
    audit_overlap: AuditOverlap | None = None


class PreviewToken(BaseModel):
    id: int
    text: str
    trained: bool


class PreviewRow(BaseModel):
    """One row as the model's template renders it; loss falls on the tokens that are `trained`.

    At most 4,096 tokens are shown; `error` says why a row was not rendered.
    """

    line: int
    n_tokens: int = 0
    n_trained: int = 0
    tokens: list[PreviewToken] = []
    error: str | None = None


class Preview(BaseModel):
    object: Literal["file.preview"] = "file.preview"
    file_id: str
    model: str
    data: list[PreviewRow]


class Conversion(BaseModel):
    """The first rows of a file as chat rows, and the new file if one was made."""

    object: Literal["file.conversion"] = "file.conversion"
    source_file: str
    format: Literal["sharegpt", "alpaca"]
    data: list[dict[str, Any]]
    file: FileOut | None
