"""Find a project's own models by name (fine-tuned models and released checkpoints), and start jobs from them.

A model whose audit failed may be used by the provider, and by its project while a waiver is in force.

A lineage is a chain of jobs, each of which starts from the adapter of the one before; its length is limited. Every job
of a lineage is compared with the base model, so that small regressions cannot add up unnoticed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import db
from app.catalog import service as catalog
from app.db.tables import TERMINAL, BaseModelEntry, Job, JobCheckpoint
from app.db.tables.job_records import Adapter, SafetySummary
from app.db.tables.job_spec import StartFrom
from app.db.tables.jobs import FINAL
from app.errors import Forbidden, InvalidRequest, InvalidState
from app.jobs.request import JobCreate
from app.keys import Principal
from spard.config import Lora
from spard.config.run_spec import parse

_NOTHING_ASKED = "The provider has turned off audits of checkpoints (SPARD_CHECKPOINT_PROMPTS is 0)."
_NOT_KEPT = (
    "Only the last checkpoints of a job are kept, and only they are audited: this one is replaced before the job ends. "
    "Cancel the job with audit_last to have its last epochs audited where it stands."
)
_NOT_KEPT_OVER = "Only checkpoints that are kept are audited; this one was due to be replaced before the job's end."
_NAME = re.compile(r"ft:[^\0]{1,400}:([0-9a-f]{12}):ckpt-step-([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A fine-tuned model or a released checkpoint, with the archive of its adapter."""

    name: str
    job: Job
    adapter: Adapter | None
    checkpoint: JobCheckpoint | None = None  # None: the fine-tuned model of the job

    def check(self, session: Session, caller: Principal) -> None:
        """Raise Forbidden unless the caller may use the adapter.

        A customer may not use an adapter that was released to the provider only, or one whose waiver has expired.
        """
        if self.checkpoint is None or self.checkpoint.kind == FINAL:
            check_release(session, caller, self.job)
        elif not is_passed(self.checkpoint) and "admin" not in caller.scopes:
            raise Forbidden("This checkpoint was released to the provider only.", code="not_published")


def checkpoint_name(job: Job, checkpoint: JobCheckpoint) -> str:
    """Return the checkpoint's name in OpenAI's form: the fine-tuned model's name and the step."""
    return f"{fine_tuned_model(job)}:ckpt-step-{checkpoint.step}"


def is_passed(checkpoint: JobCheckpoint) -> bool:
    """Return True if a checkpoint passed its own audit."""
    return checkpoint.safety is not None and checkpoint.safety["gate"]["decision"] == "pass"


def why_not_audited(job: Job, checkpoint: JobCheckpoint) -> str | None:
    """Explain why the checkpoint of an epoch has no audit; None if it has one or predates checkpoint audits."""
    if checkpoint.safety is not None or checkpoint.kind is None:
        return None
    if not job.spec.checkpoint_prompts:
        return _NOTHING_ASKED
    return _NOT_KEPT_OVER if job.public_status in TERMINAL else _NOT_KEPT


def find_checkpoint(session: Session, project_id: str, name: str) -> tuple[Job, JobCheckpoint] | None:
    """Return the checkpoint of this name, released or not; None if the project has none."""
    if match := _NAME.fullmatch(name):
        prefix, step = match.group(1), int(match.group(2))
        same = (Job.project_id == project_id) & Job.id.startswith(f"ftjob-{prefix}") & (JobCheckpoint.step == step)
        query = select(Job, JobCheckpoint).join(JobCheckpoint, JobCheckpoint.job_id == Job.id).where(same)
        # Callers ask again after they have locked the job: `populate_existing` replaces what the session read before.
        for job, checkpoint in session.execute(query.execution_options(populate_existing=True)):
            # The name holds only 12 digits of the job's id, so the whole name decides.
            if checkpoint_name(job, checkpoint) == name:
                return job, checkpoint
    return None


def archive(session: Session, job: Job, checkpoint: JobCheckpoint) -> Adapter | None:
    """Return a checkpoint's archive; None if it is held back, withheld or deleted, or its waiver has expired."""
    if checkpoint.kind == FINAL:
        # The final checkpoint shares the job's archive, and with it every reason to withhold the job's model.
        model = job.fine_tuned_model
        return job.adapter if model and catalog.find_tuned_job(session, job.project_id, model) else None
    if checkpoint.storage_key is None or checkpoint.sha256 is None:
        return None
    if catalog.is_withheld(session, checkpoint.safety, catalog.last_later_audit(session, job.id, checkpoint.step)):
        return None
    return {"storage_key": checkpoint.storage_key, "sha256": checkpoint.sha256, "bytes": checkpoint.bytes or 0}


def own_model(session: Session, project_id: str, name: str) -> OwnModel | None:
    """Return the project's model of this name; None if there is no such model or it was held back."""
    if found := find_checkpoint(session, project_id, name):
        job, checkpoint = found
        adapter = archive(session, job, checkpoint)
        return OwnModel(name, job, adapter, checkpoint) if adapter else None
    made = catalog.find_tuned_job(session, project_id, name)
    return OwnModel(name, made, made.adapter) if made else None


def fine_tuned_model(job: Job) -> str:
    """Return the model's name in OpenAI's form: ft:{base}:{organization}:{suffix}:{id}."""
    return f"ft:{job.model}:{job.project_id}:{job.suffix or ''}:{job.id.removeprefix('ftjob-')[:12]}"


# Decide who may download an adapter that did not pass the safety gate.


def check_release(session: Session, caller: Principal, job: Job) -> None:
    """Raise Forbidden unless the adapter passed its gate, a waiver is in force, or the caller is the provider."""
    summary = job.safety or SafetySummary()
    if waiver := summary.get("waiver"):
        if waiver["expires_at"] <= db.clock(session).timestamp():
            raise Forbidden(f"The waiver that released the adapter of {job.id} has expired.", code="waiver_expired")
    elif not ("gate" in summary and summary["gate"]["decision"] == "pass") and "admin" not in caller.scopes:
        raise Forbidden("This adapter was released to the provider only.", code="not_published")


# Start a job from the adapter of an earlier one.

LONGEST_LINEAGE = 3  # jobs in one lineage, including the first


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


def find_start(session: Session, caller: Principal, ask: JobCreate) -> Start | None:
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
    if len(lineage) >= LONGEST_LINEAGE:
        message = f"{ask.model} is the last of {LONGEST_LINEAGE} jobs on top of each other; start from the base model."
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
