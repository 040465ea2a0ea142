"""Response schemas of jobs: OpenAI's object, extended by `safety` and `warnings`."""

from __future__ import annotations

import time
from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, JsonValue, with_config
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from app.db.tables import TERMINAL, JobStatus
from app.db.tables.job_records import (
    AttackSuccessJson,
    BaseAndAdapterJson,
    DefenseJson,
    DpoHyperparametersJson,
    EndingJson,
    EvidenceJson,
    GateJson,
    HyperparametersJson,
    JobError,
    LoraJson,
    Progress,
    SafetySummary,
    SelectionJson,
    TaskCheckJson,
    WaiverFacts,
)
from app.db.tables.job_spec import IntegrationRef, PolicyRef
from app.http.schemas import Absent, UnixTime
from app.jobs.rows import AnyJob
from app.jobs.scheduling import Place
from spard.config import Dpo

# Response schemas that confirm the deletion of a job or a fine-tuned model.


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


# Response schemas of OpenAI's `method` and `integrations`.


class SupervisedOut(BaseModel):
    """OpenAI's `supervised`, with the hyperparameters used."""

    hyperparameters: HyperparametersJson


class DpoOut(BaseModel):
    """OpenAI's `dpo`, with the hyperparameters used."""

    hyperparameters: DpoHyperparametersJson


class MethodOut(BaseModel):
    """OpenAI's `method`; only the field that `type` names is present."""

    type: Literal["supervised", "dpo"]
    supervised: Annotated[SupervisedOut | SkipJsonSchema[None], Absent] = None
    dpo: Annotated[DpoOut | SkipJsonSchema[None], Absent] = None


class WandbOut(BaseModel):
    """The run that OpenAI's `wandb` integration writes to."""

    project: str
    name: str | None = None
    entity: str | None = None
    tags: Annotated[list[str] | SkipJsonSchema[None], Absent] = None


class IntegrationOut(BaseModel):
    """One of OpenAI's integrations that the provider has turned on."""

    type: str
    wandb: WandbOut


def integration_response(asked: IntegrationRef) -> IntegrationOut:
    """Return the API's object for an integration."""
    tags = list(asked.tags) or None
    to = WandbOut(project=asked.project, name=asked.name, entity=asked.entity, tags=tags)
    return IntegrationOut(type=asked.type, wandb=to)


def method_response(job: AnyJob, hyperparameters: HyperparametersJson) -> MethodOut:
    """Return the API's object for a job's method, with the hyperparameters used."""
    dpo = job.recipe.get("dpo")
    if dpo is None:
        return MethodOut(type="supervised", supervised=SupervisedOut(hyperparameters=hyperparameters))
    beta = Dpo().strength if job.resolved and dpo["beta"] == "auto" else dpo["beta"]
    return MethodOut(type="dpo", dpo=DpoOut(hyperparameters={**hyperparameters, "beta": beta}))


_START: Progress = {"percent": 0, "step": None, "total_steps": None, "eta_seconds": None}

StepMetrics = dict[str, int | float | None]  # step, and one training step's numbers by name


@with_config(ConfigDict(extra="allow"))
class ShownProgress(Progress):
    """A job's progress; `queue_position` counts from 1 while the job is queued.

    `queue_reason` explains why no live worker can take the job, and is absent otherwise.
    """

    queue_position: int | None
    queue_reason: NotRequired[str]


class QueuedProgress(TypedDict):
    """The part of `ShownProgress` that describes the place in the queue."""

    queue_position: int | None
    queue_reason: NotRequired[str]


class ProgressAtEnd(TypedDict, total=False):
    """The progress fields that are fixed once a job has ended."""

    percent: int | float
    eta_seconds: int | None


@with_config(ConfigDict(extra="allow"))
class JobSafety(TypedDict):
    """The defense, the job's stage and progress and, after its audit, the measurements."""

    phase: str
    defense: DefenseJson
    selection: SelectionJson
    policy: PolicyRef
    lineage: list[str]
    progress: ShownProgress
    asr: AttackSuccessJson | None
    harmfulness_score: BaseAndAdapterJson | None
    over_refusal: BaseAndAdapterJson | None
    utility: BaseAndAdapterJson | None
    trigger_rate: float | None
    gate: GateJson | None
    audit_version: int | None
    seconds: NotRequired[dict[str, float]]
    waiver: NotRequired[WaiverFacts]
    ending: NotRequired[EndingJson]
    task_check: NotRequired[TaskCheckJson]
    evidence: NotRequired[EvidenceJson]


class JobOut(BaseModel):
    """One fine-tuning job. `hyperparameters` are the values used, once they are known."""

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
    error: JobError | None
    hyperparameters: HyperparametersJson
    method: MethodOut
    integrations: list[IntegrationOut] | None = None
    metadata: dict[str, str] | None
    safety: JobSafety
    lora: LoraJson | None
    warnings: list[str]
    suffix: Annotated[str | None, Field(exclude=True)] = None  # for pages; API clients know what they sent
    filename: Annotated[str | None, Field(exclude=True)] = None  # of the training file, for pages; None: it was deleted


class JobList(BaseModel):
    """One page of your jobs, newest first; for the next page set `after` to the last job's `id`."""

    object: Literal["list"] = "list"
    data: list[JobOut]
    has_more: bool


class EventOut(BaseModel):
    """One event of a job, in OpenAI's words."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: UnixTime
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics", "moderation_checks"]
    data: Annotated[dict[str, JsonValue] | SkipJsonSchema[None], Absent] = None


class EventList(BaseModel):
    """One page of a job's events, newest first; for the next page set `after` to the last event's `id`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["list"] = "list"
    data: list[EventOut]
    has_more: bool


class MetricList(BaseModel):
    """The metrics of every training step, first step first."""

    object: Literal["list"] = "list"
    data: list[StepMetrics]


class VerdictOut(BaseModel):
    """A job's outcome in the words of its page: the measured counts, and the gate's decision on them.

    `look` is `good` if the gate passed, `bad` if it failed, `doubt` if it could not decide, else `plain`.
    """

    object: Literal["safety.verdict"] = "safety.verdict"
    job_id: str
    look: Literal["good", "bad", "doubt", "plain"]
    pill: str
    headline: str
    sentence: str
    reasons: list[str]


def job_response(job: AnyJob, place: Place | None) -> JobOut:
    """Return the API's object for a job; `place` is its place in the queue, None if it is not queued."""
    hyperparameters, start = _hyperparameters(job), job.spec.start_from
    return JobOut(
        id=job.id,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        estimated_finish=_estimated_finish(job),
        model=start.model if start and start.model else job.model,
        fine_tuned_model=job.fine_tuned_model,
        organization_id=job.project_id,
        status=job.public_status,
        training_file=job.training_file,
        validation_file=job.validation_file,
        result_files=job.result_files or [],
        trained_tokens=job.trained_tokens,
        seed=job.recipe["seed"],
        error=job.error,
        hyperparameters=hyperparameters,
        method=method_response(job, hyperparameters),
        integrations=[integration_response(each) for each in job.spec.integrations] or None,
        metadata=job.job_metadata,
        safety=_safety(job, place or Place()),
        lora=job.recipe["lora"],
        warnings=job.warnings or [],
        suffix=job.suffix,
    )


def _hyperparameters(job: AnyJob) -> HyperparametersJson:
    numbers = job.resolved or job.recipe["hyperparameters"]
    return {
        "n_epochs": numbers["n_epochs"],
        "batch_size": numbers["batch_size"],
        "learning_rate_multiplier": numbers["learning_rate_multiplier"],
    }


def _safety(job: AnyJob, place: Place) -> JobSafety:
    progress: Progress = {**(job.progress or _START)}
    if job.public_status != JobStatus.running:
        progress.pop("doing", None)
    queued: QueuedProgress = {"queue_position": place.position}
    if place.reason is not None:
        queued["queue_reason"] = place.reason
    measured: SafetySummary = job.safety or {}
    if "ending" in job.recipe:
        measured = {**measured, "ending": {**job.recipe["ending"], **measured.get("ending", {})}}
    return {
        "phase": job.phase,
        "defense": job.recipe["defense"],
        "selection": job.recipe["selection"],
        "policy": job.spec.policy,
        "lineage": list(job.spec.start_from.lineage) if job.spec.start_from else [],
        "progress": {**progress, **_at_end(job), **queued},
        "asr": None,
        "harmfulness_score": None,
        "over_refusal": None,
        "utility": None,
        "trigger_rate": None,
        "gate": None,
        # Audits of version 1 stored no number; a newer summary overwrites this below.
        "audit_version": 1 if "gate" in measured else None,
        **measured,
    }


def _at_end(job: AnyJob) -> ProgressAtEnd:
    """Return the progress fields that an ended job overrides: no time left, and 100 percent if it succeeded."""
    if job.public_status == JobStatus.succeeded:
        return {"percent": 100, "eta_seconds": None}
    return {"eta_seconds": None} if job.public_status in TERMINAL else {}


def _estimated_finish(job: AnyJob) -> int | None:
    eta_s = job.progress["eta_seconds"] if job.progress else None
    return int(time.time() + eta_s) if job.public_status == JobStatus.running and eta_s is not None else None
