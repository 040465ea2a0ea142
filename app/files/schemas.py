"""Response schemas of files: OpenAI's file objects, validation, previews and conversions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from app.http.schemas import Absent, UnixTime


class FileOut(BaseModel):
    """An uploaded file, or one that a job produced."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: UnixTime
    expires_at: Annotated[UnixTime | SkipJsonSchema[None], Absent] = None
    filename: str
    purpose: Literal["fine-tune", "fine-tune-results"]
    status: Literal["processed", "error"]
    status_details: Annotated[str | SkipJsonSchema[None], Absent] = None


class FileList(BaseModel):
    """One page of files, newest first by default."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[FileOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """Confirms that a file was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class TokenCounts(BaseModel):
    """Tokens of the file's first rows under one base model; `histogram` counts rows by length in tokens.

    At most 100,000 rows are counted, and fewer if the CPU time of the request runs out; `approximate` is true if not
    all of `rows_in_file` were counted. `rows` were counted, `rows_not_rendered` could not be rendered.

    A job fails on a row of more than `limit` tokens and on one without a token to learn; at most 100 lines are listed
    for each. `total` includes both conversations of a preference pair; the length of a pair is that of its longer one.
    """

    model: str
    approximate: bool
    rows: int
    rows_not_rendered: int
    rows_in_file: int
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
    problems: Annotated[list[dict[str, Any]], Field(exclude=True)] = []  # listed with the file's problems instead


class Overlap(BaseModel):
    """Rows that occur in both files, among the first 10,000 of each; at most 100 lines are listed."""

    validation_file: str
    rows: int
    lines: list[int]


class AuditOverlap(BaseModel):
    """Number of audit prompts in the first 10,000 rows, and the lines that contain them, at most 100."""

    prompts: int
    lines: list[int]


class FindingOut(BaseModel):
    """One fault that `rows` of a file's `of` rows have; `lines` are the first ten, `text` is the complete sentence.

    A star in `pointer` stands for any index. `excerpt` is the piece of the first such row around the fault, with
    characters that cannot be seen escaped; it is empty for faults of the whole file and for files that were stored
    without it. A finding of the severity `note` needs no fix.
    """

    code: str
    severity: Literal["error", "warning", "note"]
    rows: int
    of: int
    lines: list[int]
    pointer: str
    message: str
    hint: str
    text: str
    excerpt: str = ""


class Validation(BaseModel):
    """The validation of a file: `findings` list each fault once, with the number of rows that have it.

    `problems` lists the same by line, up to a thousand per severity; with a model, also up to 100 rows that its chat
    template refuses or renders without their tools. If there are more, `next_after_line` is where the list continues.
    `tokens`, `overlap` and `audit_overlap` are present if they were requested.
    """

    object: Literal["file.validation"] = "file.validation"
    file_id: str
    status: str
    rows: int | None
    counts: dict[str, int]
    findings: list[FindingOut]
    problems: list[dict[str, Any]]
    next_after_line: int | None = None
    tokens: TokenCounts | None = None
    overlap: Overlap | None = None
    audit_overlap: AuditOverlap | None = None


class PreviewToken(BaseModel):
    """One token of the model's tokenizer; `trained` is true if the loss includes it."""

    id: int
    text: str
    trained: bool


class PreviewAnswer(BaseModel):
    """The non-preferred conversation of a preference pair, or an earlier sample of a row."""

    n_tokens: int
    n_trained: int
    tokens: list[PreviewToken]


class PreviewRow(BaseModel):
    """One row as the model's template renders it; the loss includes the tokens that are `trained`.

    At most 4,096 tokens are listed; `error` says why a row was not rendered. For a preference pair it is the
    conversation with the preferred answer, and `non_preferred` is the other one. If the template rewrites earlier
    turns, each answer is a sample of its own: `tokens` are those of the last sample, `earlier_samples` are the others,
    and the counts cover all.
    """

    line: int
    n_tokens: int = 0
    n_trained: int = 0
    tokens: list[PreviewToken] = []
    non_preferred: Annotated[PreviewAnswer | SkipJsonSchema[None], Absent] = None
    earlier_samples: Annotated[list[PreviewAnswer] | SkipJsonSchema[None], Absent] = None
    error: str | None = None


class Preview(BaseModel):
    """Rows of a file as one base model sees them in training."""

    object: Literal["file.preview"] = "file.preview"
    file_id: str
    model: str
    data: list[PreviewRow]


class Conversion(BaseModel):
    """The first rows of a file in OpenAI's form, and the new file if one was made.

    `format` is the rows' original format. `left_out` names the columns that were not converted: columns named in the
    request, and labels such as `id`.
    """

    object: Literal["file.conversion"] = "file.conversion"
    source_file: str
    format: Literal["sharegpt", "alpaca", "trl", "openai"]
    left_out: list[str]
    data: list[dict[str, Any]]
    file: FileOut | None
