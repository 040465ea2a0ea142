"""A job as its customer sees it: OpenAI's object, with `safety` and `warnings` added."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.files.schemas import UnixTime
from app.models import Job, JobStatus

_NUMBERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
_MEASURED = ("asr", "harmfulness_score", "over_refusal", "utility", "trigger_rate", "gate")
_PROGRESS: dict[str, Any] = {"percent": 0, "step": None, "total_steps": None, "eta_seconds": None}


class JobOut(BaseModel):
    """One fine-tuning run. `hyperparameters` are the numbers used, once they are known."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: UnixTime
    started_at: UnixTime | None
    finished_at: UnixTime | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: JobStatus
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    error: dict[str, Any] | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    integrations: list[Any] | None = None
    metadata: dict[str, str] | None
    safety: dict[str, Any]
    lora: dict[str, Any] | None
    warnings: list[str]


class JobList(BaseModel):
    object: Literal["list"] = "list"
    data: list[JobOut]
    has_more: bool


class EventOut(BaseModel):
    """What happened, in OpenAI's words."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: UnixTime
    level: str
    message: str
    type: str
    data: dict[str, Any] | None


class EventList(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[EventOut]
    has_more: bool


class MetricList(BaseModel):
    """Every step's numbers, the first step first."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class ModelDeleted(BaseModel):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class JobDeleted(BaseModel):
    """What stays of an erased job. `deleted_files` went with it."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    deleted: Literal[True] = True
    erased_at: UnixTime
    status: str
    digests: dict[str, str | None]
    deleted_files: list[str]


def shown(job: Job, queue_position: int | None) -> JobOut:
    """The object of the API for a row."""
    hyperparameters = _hyperparameters(job)
    return JobOut(
        id=job.id,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        estimated_finish=_estimated_finish(job),
        model=(job.spec.get("start_from") or {}).get("model", job.model),
        fine_tuned_model=job.fine_tuned_model,
        organization_id=job.tenant_id,
        status=job.status,
        training_file=job.training_file,
        validation_file=job.validation_file,
        result_files=job.result_files or [],
        trained_tokens=job.trained_tokens,
        seed=job.recipe["seed"],
        error=job.error,
        hyperparameters=hyperparameters,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        metadata=job.job_metadata,
        safety=_safety(job, queue_position),
        lora=job.recipe["lora"],
        warnings=job.warnings or [],
    )


def _hyperparameters(job: Job) -> dict[str, Any]:
    return {name: (job.resolved or {}).get(name, job.recipe["hyperparameters"][name]) for name in _NUMBERS}


def _safety(job: Job, queue_position: int | None) -> dict[str, Any]:
    measured = job.safety or {}
    return {
        "phase": job.phase,
        "defense": job.recipe["defense"],
        "selection": job.recipe["selection"],
        "policy": job.spec["policy"],
        "lineage": (job.spec.get("start_from") or {}).get("lineage", []),
        "progress": _PROGRESS | (job.progress or {}) | {"queue_position": queue_position},
        **dict.fromkeys(_MEASURED),
        **measured,
    }


def _estimated_finish(job: Job) -> int | None:
    eta_s = (job.progress or {}).get("eta_seconds")
    return int(time.time() + eta_s) if job.status == JobStatus.running and eta_s is not None else None
