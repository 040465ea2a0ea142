"""OpenAI's checkpoint and permission objects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.files.schemas import UnixTime
from app.jobs.request import Body


class CheckpointOut(BaseModel):
    """A step of a training with its numbers. The model's name is a name only: its weights are not served."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: UnixTime
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, Any]


class CheckpointList(BaseModel):
    """One page of checkpoints, the latest step first."""

    object: Literal["list"] = "list"
    data: list[CheckpointOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PermissionCreate(Body):
    """Which projects may know of the checkpoint."""

    project_ids: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]], Field(min_length=1, max_length=100)
    ]


class PermissionOut(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: UnixTime
    project_id: str


class PermissionList(BaseModel):
    """One page of permissions, newest first unless asked otherwise."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[PermissionOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PermissionDeleted(BaseModel):
    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    deleted: Literal[True] = True
