"""Response schemas that confirm the deletion of a job or a fine-tuned model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from app.http.schemas import UnixTime


class ModelDeleted(BaseModel):
    """Confirms that a fine-tuned model, or the weights of a checkpoint, were deleted."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class JobDeleted(BaseModel):
    """The record that stays of an erased job. `deleted_files` lists the files that were erased with it."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    deleted: Literal[True] = True
    erased_at: UnixTime
    status: str
    digests: dict[str, str | None]
    deleted_files: list[str]
