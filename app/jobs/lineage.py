"""Continue training from the adapter of an earlier job, and limit such lineages.

Every job of a lineage is compared with the base model, so that small regressions cannot add up unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.tables import TERMINAL, BaseModelEntry, Job
from app.db.tables.job_spec import StartFrom
from app.errors import InvalidRequest, InvalidState
from app.jobs.project_models import OwnModel, find_checkpoint, own_model, why_not_audited
from app.jobs.request import JobCreate
from app.keys.service import Principal
from spard.config import Lora
from spard.config.run_spec import parse

LONGEST = 3  # jobs in one lineage, including the first


@dataclass(frozen=True, slots=True)
class Start:
    """The model that a new job starts from, and the ids of all earlier jobs of its lineage, first to last."""

    model: OwnModel
    lineage: tuple[str, ...]

    @property
    def job(self) -> Job:
        """The job that made the model."""
        return self.model.job

    @property
    def lora(self) -> Lora:
        """The LoRA settings of its adapter, which the new job has to keep."""
        found: Lora = parse(Lora, self.job.recipe["lora"], "lora")
        return found

    def reference(self) -> StartFrom:
        """Return the reference to the model that the new job's spec stores."""
        adapter = self.model.adapter
        if adapter is None:
            raise InvalidState(f"Job {self.job.id} has no adapter to start from.", code="not_published")
        return StartFrom(
            id=self.job.id,
            model=self.model.name,
            lineage=self.lineage,
            storage_key=adapter["storage_key"],
            sha256=adapter["sha256"],
        )


def start(session: Session, caller: Principal, ask: JobCreate) -> Start | None:
    """Return the model that a request starts from if it names one of the caller's fine-tuned models; else None.

    Raises `InvalidRequest` if the lineage is too long or the checkpoint was not audited, and `Forbidden` if the caller
    may not use the model.
    """
    model = _lock_model(session, caller.project_id, ask.model)
    # A base model may be offered under any alias, also under one that looks like a fine-tuned model's name.
    if model is None or session.get(BaseModelEntry, ask.model) is not None:
        return None
    model.check(session, caller)
    lineage = (*_earlier_models(model.job), model.job.id)
    if len(lineage) >= LONGEST:
        message = f"{ask.model} is the last of {LONGEST} jobs on top of each other; start from the base model."
        raise InvalidRequest(message, code="lineage_too_long", param="model")
    return Start(model, lineage)


def check_unneeded(session: Session, job: Job) -> None:
    """Raise `InvalidState` if an unfinished job starts from this job's adapter."""
    needs = (Job.project_id == job.project_id) & Job.status.not_in(TERMINAL)
    user = session.scalar(select(Job.id).where(needs, Job.spec["start_from"]["id"].as_string() == job.id).limit(1))
    if user is not None:
        raise InvalidState(f"Job {user} starts from the adapter of {job.id}; cancel it first.")


def _lock_model(session: Session, project_id: str, name: str) -> OwnModel | None:
    """Return the model of this name with its job locked, so that it cannot be deleted before the new job is stored."""
    model = own_model(session, project_id, name)
    if model is None:
        _refuse_unaudited(session, project_id, name)
        return None
    # A shared lock: several jobs may start from one model at the same time, but none may delete it.
    session.execute(select(Job.id).where(Job.id == model.job.id).with_for_update(read=True))
    return own_model(session, project_id, name)  # it may have been deleted while we waited for the lock


def _refuse_unaudited(session: Session, project_id: str, name: str) -> None:
    """Raise `InvalidRequest` if the name belongs to a checkpoint that was not audited."""
    found = find_checkpoint(session, project_id, name)
    why = why_not_audited(*found) if found else None
    if why is not None:
        message = f"{name} was not audited, so no job can start from it. {why}"
        raise InvalidRequest(message, code="not_published", param="model")


def _earlier_models(job: Job) -> tuple[str, ...]:
    return job.spec.start_from.lineage if job.spec.start_from else ()
