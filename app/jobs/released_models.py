"""Find models and checkpoints of all projects that an audit released, for a later audit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import InstrumentedAttribute

from app.db.tables import DeletedModel, Job, JobCheckpoint, LaterAudit
from app.db.tables.checkpoints import EPOCH
from app.db.tables.job_records import Adapter
from app.db.tables.jobs import WHOLE_JOB
from app.errors import InvalidState, NotFound
from spard.release.version import AUDIT_VERSION

_IS_RELEASED = Job.fine_tuned_model.is_not(None) & Job.id.not_in(select(DeletedModel.job_id))
_IS_KEPT = (JobCheckpoint.kind == EPOCH) & JobCheckpoint.storage_key.is_not(None)


@dataclass(frozen=True, slots=True)
class Model:
    """A released model: its job, the step of its checkpoint (0 for the job's model), and its archive."""

    job: Job
    step: int
    adapter: Adapter

    @property
    def display_name(self) -> str:
        """The model's name in events and errors."""
        return model_display_name(self.step)


def model_display_name(step: int) -> str:
    """Return the name of a job's model, or of its checkpoint at `step`, in events and errors."""
    return "The model" if step == WHOLE_JOB else f"The checkpoint of step {step}"


def find_model(session: Session, job_id: str, step: int) -> Model:
    """Return one released model of a job.

    Raises `NotFound` if there is no such job, and `InvalidState` if the model or checkpoint is not released.
    """
    job = session.get(Job, job_id)
    if job is None:
        raise NotFound(f"Could not find fine tune: {job_id}", code="fine_tune_not_found", param="fine_tuning_job_id")
    query = _checkpoints().where(Job.id == job_id, JobCheckpoint.step == step)
    found = _of_jobs(session, Job.id == job_id) if step == WHOLE_JOB else _of_checkpoints(session, query)
    model = next(found, None)
    if model is None:
        raise InvalidState(f"{model_display_name(step)} of {job_id} is not released; there is nothing to audit.")
    return model


def older(session: Session, limit: int) -> list[Model]:
    """Return at most `limit` released models that no audit of today's version has examined; jobs, then checkpoints.

    Each group is ordered by age, oldest first.
    """
    jobs = _of_jobs(session, _is_due(Job.safety, Job.id), limit)
    due = _is_due(JobCheckpoint.safety, JobCheckpoint.job_id, JobCheckpoint.step)
    query = _checkpoints().where(due).order_by(JobCheckpoint.created_at, JobCheckpoint.id).limit(limit)
    return list(islice(chain(jobs, _of_checkpoints(session, query)), limit))


def _of_jobs(session: Session, which: ColumnElement[bool], limit: int = 1) -> Iterator[Model]:
    query = select(Job).where(_IS_RELEASED, which).order_by(Job.created_at, Job.id).limit(limit)
    for job in session.scalars(query):
        if job.adapter:
            yield Model(job, WHOLE_JOB, job.adapter)


def _checkpoints() -> Any:
    return select(Job, JobCheckpoint).join(JobCheckpoint, JobCheckpoint.job_id == Job.id).where(_IS_KEPT)


def _of_checkpoints(session: Session, query: Any) -> Iterator[Model]:
    for job, kept in session.execute(query):
        yield Model(job, kept.step, {"storage_key": kept.storage_key, "sha256": kept.sha256, "bytes": kept.bytes or 0})


def _is_due(
    safety: InstrumentedAttribute[Any],
    job_id: InstrumentedAttribute[str],
    step: InstrumentedAttribute[int] | None = None,
) -> ColumnElement[bool]:
    """Match models released by an older audit for which no later audit of today's version exists."""
    of_step = LaterAudit.step == (WHOLE_JOB if step is None else step)
    asked = select(LaterAudit.id).where(LaterAudit.job_id == job_id, of_step, LaterAudit.audit_version >= AUDIT_VERSION)
    # Audits of version 1 stored no number.
    is_older = func.coalesce(safety["audit_version"].as_integer(), 1) < AUDIT_VERSION
    return is_older & safety["gate"].is_not(None) & ~asked.exists()
