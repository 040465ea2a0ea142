"""Projects, their limits and their use, as the provider sees them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.http.schemas import Body, UnixTime

_MOST = 2**53
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Size = Annotated[int, Field(ge=0, le=_MOST)]


class QuotaSet(Body):
    """Limits of one project; what is null is not limited (requests: as the deployment has it).

    `weight` is its share of the GPUs against others', null for 1: twice the weight has twice the time.
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
    """A project: whoever holds a key of it shares its files, jobs and limits."""

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
    """What a project used with the jobs of a time, and the bytes and rows of the files that it stores now.

    `calls` and the two counts of tokens are those of replies that were asked for in that time.
    `pending_bytes` are those of uploads that are not complete and of what is being written or waits to be deleted.
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
    """What each project used, by project id."""

    object: Literal["list"] = "list"
    data: list[Usage]
    has_more: Literal[False] = False
