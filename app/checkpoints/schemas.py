"""Schemas of OpenAI's checkpoint and permission objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from app.db.tables.job_records import CheckpointSafety
from app.http.schemas import Body, UnixTime


@with_config(ConfigDict(extra="allow"))
class CheckpointMetrics(TypedDict, total=False):
    """Metrics under OpenAI's names, if they were measured; non-finite numbers are null."""

    step: int
    train_loss: float | None
    train_mean_token_accuracy: float | None
    valid_loss: float | None
    valid_mean_token_accuracy: float | None
    full_valid_loss: float | None
    full_valid_mean_token_accuracy: float | None


class CheckpointOut(BaseModel):
    """The checkpoint of an epoch with its metrics. `safety` is its audit's result, null if it was not audited.

    `not_audited` explains why not: a checkpoint that will not be kept is audited only if the job ends early. If the
    gate passed, `fine_tuned_model_checkpoint` is a model that can be downloaded and trained further.
    """

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: UnixTime
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics
    safety: CheckpointSafety | None
    not_audited: str | None = None


class CheckpointList(BaseModel):
    """One page of checkpoints, latest step first."""

    object: Literal["list"] = "list"
    data: list[CheckpointOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PermissionCreate(Body):
    """The projects that may see the checkpoint."""

    project_ids: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]], Field(min_length=1, max_length=100)
    ]


class PermissionOut(BaseModel):
    """One project that may see a checkpoint."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    created_at: UnixTime
    project_id: str


class PermissionList(BaseModel):
    """One page of permissions, newest first by default."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[PermissionOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PermissionDeleted(BaseModel):
    """Confirms that a permission was withdrawn."""

    id: str
    object: Literal["checkpoint.permission"] = "checkpoint.permission"
    deleted: Literal[True] = True
