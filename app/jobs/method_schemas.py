"""Response schemas of OpenAI's `method` and `integrations`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from app.db.tables.job_records import DpoHyperparametersJson, HyperparametersJson
from app.db.tables.job_spec import IntegrationRef
from app.http.schemas import Absent
from app.jobs.rows import AnyJob
from spard.config import Dpo


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
