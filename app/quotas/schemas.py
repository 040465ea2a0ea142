"""Schemas of projects, their limits and their usage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.http.schemas import Body, UnixTime

_MOST = 2**53
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Size = Annotated[int, Field(ge=0, le=_MOST)]


class QuotaSet(Body):
    """Limits of one project; null means unlimited (for requests: the deployment's limit).

    `weight` is its share of the GPUs relative to others, null for 1: twice the weight gets twice the time.
    """

    model_config = ConfigDict(extra="forbid", from_attributes=True)

    max_file_bytes: Size | None = None
    max_file_rows: Size | None = None
    max_jobs_per_day: Count | None = None
    max_unfinished_jobs: Count | None = None
    max_gpu_seconds: Annotated[float, Field(ge=0, le=_MOST)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tokens_per_day: Size | None = None
    weight: Annotated[float, Field(ge=0.01, le=1000)] | None = None


class ProjectCreate(Body):
    """A project to create. `name` is printable ASCII."""

    name: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,64}$")]


class ProjectOut(BaseModel):
    """A project: all holders of its keys share its files, jobs and limits."""

    id: str
    object: Literal["project"] = "project"
    name: str
    created_at: UnixTime
    quota: QuotaSet


class ProjectList(BaseModel):
    """All projects with their limits, oldest first."""

    object: Literal["list"] = "list"
    data: list[ProjectOut]
    has_more: Literal[False] = False


class Usage(BaseModel):
    """A project's usage by jobs of a period, and the bytes and rows of its currently stored files.

    `calls` and both token counts are of inference requests in the period. `pending_bytes` are bytes of incomplete
    uploads, and of objects that are being written or wait for deletion.
    """

    object: Literal["usage"] = "usage"
    project_id: str
    jobs: int
    gpu_seconds: float
    trained_tokens: int
    calls: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    file_bytes: int = 0
    file_rows: int = 0
    pending_bytes: int = 0


class UsageList(BaseModel):
    """Usage by project id."""

    object: Literal["list"] = "list"
    data: list[Usage]
    has_more: Literal[False] = False
