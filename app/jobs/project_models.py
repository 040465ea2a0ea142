"""Find a project's own models by name: the fine-tuned models of its jobs, and released checkpoints.

A model whose audit failed may be used by the provider, and by its project while a waiver is in force.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app import db
from app.catalog import badges
from app.catalog import service as catalog
from app.db.tables import TERMINAL, Job, JobCheckpoint
from app.db.tables.job_records import Adapter, SafetySummary
from app.db.tables.jobs import FINAL
from app.errors import Forbidden
from app.keys.service import Principal

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
    if badges.is_withheld(session, checkpoint.safety, badges.latest(session, job.id, checkpoint.step)):
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
