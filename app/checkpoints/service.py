"""Serve checkpoints to the owners of jobs, with permissions; every query is limited to one project."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, with_config
from sqlalchemy import Select, select
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from app import audit_log, objects
from app.catalog import service as catalog
from app.catalog.schemas import ModelOut
from app.db import Begin
from app.db.tables import CheckpointPermission, Job, JobCheckpoint
from app.db.tables.job_records import Adapter, CheckpointSafety
from app.db.tables.jobs import FINAL, WHOLE_JOB
from app.errors import AppError, InvalidState, NotFound
from app.http.pagination import Page, note_deleted, page, place, select_deleted_position
from app.http.schemas import Body, UnixTime
from app.jobs import erasure, project_models
from app.jobs import service as jobs
from app.jobs.project_models import OwnModel
from app.jobs.schemas import ModelDeleted
from app.keys import Principal
from app.objects import served_adapters
from app.policies import service as policies
from app.storage import Storage


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


def list_checkpoints(session: Session, project_id: str, job_id: str, after: str | None, limit: int) -> CheckpointList:
    """Return a job's checkpoints, latest step first."""
    job = jobs.get(session, project_id, job_id)
    query = select(JobCheckpoint).where(JobCheckpoint.job_id == job.id)
    if after is not None:
        cursor = session.scalar(query.where(JobCheckpoint.id == after))
        if cursor is None:  # a running job keeps only its last checkpoints
            query = query.where(
                JobCheckpoint.created_at < place(session, after, select_deleted_position(job.id, after))
            )
        else:
            query = query.where(JobCheckpoint.step < cursor.step)
    rows = list(session.scalars(query.order_by(JobCheckpoint.step.desc()).limit(limit + 1)))
    found = Page(rows[:limit], len(rows) > limit)
    return CheckpointList(
        data=[_checkpoint_response(job, row) for row in found.data],
        first_id=found.first_id,
        last_id=found.last_id,
        has_more=found.has_more,
    )


def adapter(session: Session, caller: Principal, job_id: str, checkpoint_id: str) -> tuple[str, Adapter]:
    """Return a file name and the archive of a released checkpoint, and log the download.

    Raises `InvalidState` with the reason if it is not released, and `Forbidden` if it is not released to the caller.
    """
    job = jobs.get(session, caller.project_id, job_id)
    of_job = (JobCheckpoint.job_id == job.id) & (JobCheckpoint.id == checkpoint_id)
    checkpoint = session.scalar(select(JobCheckpoint).where(of_job))
    if checkpoint is None:
        raise NotFound(f"No such checkpoint: {checkpoint_id[:64]}", code="checkpoint_not_found", param="checkpoint_id")
    file_name = f"{job.id}-step-{checkpoint.step}-adapter.tar.gz"
    if checkpoint.kind == FINAL:
        return file_name, jobs.adapter(session, caller, job.id)[1]
    archive = project_models.archive(session, job, checkpoint)
    if archive is None:
        raise _not_there(job, checkpoint)
    OwnModel(project_models.checkpoint_name(job, checkpoint), job, archive, checkpoint).check(session, caller)
    audit_log.record(session, "checkpoint.downloaded", checkpoint.id, sha256=archive["sha256"])
    return file_name, archive


def get_model(session: Session, project_id: str, model: str) -> ModelOut:
    """Return a base model, a fine-tuned model, or a released checkpoint; raise `NotFound` otherwise."""
    found = project_models.own_model(session, project_id, model)
    if found is None or found.checkpoint is None:
        return catalog.get_model(session, project_id, model)
    is_last = found.checkpoint.kind == FINAL
    safety = found.job.safety if is_last else found.checkpoint.safety
    later = catalog.last_later_audit(session, found.job.id, WHOLE_JOB if is_last else found.checkpoint.step)
    shown = ModelOut(id=model, created=int(found.checkpoint.created_at.timestamp()), owned_by=project_id)
    return catalog.mark_attestation(catalog.mark_audit(shown, safety, later), policies.serving(session))


def delete_model(storage: Storage, begin: Begin, project_id: str, model: str) -> ModelDeleted:
    """Delete a fine-tuned model, or a checkpoint's weights; the checkpoint's metrics stay."""
    with begin() as session:
        is_checkpoint = _forget_weights(session, project_id, model)
        found = project_models.find_checkpoint(session, project_id, model)
    if not is_checkpoint:
        return erasure.delete_model(storage, begin, project_id, model)
    objects.perform(storage, begin, model)
    if found is not None:
        served_adapters.require_unloaded(begin, found[0].id)
    return ModelDeleted(id=model)


def permit(session: Session, owner_id: str, model: str, project_ids: Sequence[str]) -> Page[CheckpointPermission]:
    """Permit projects to see a checkpoint; existing permissions stay."""
    checkpoint = _checkpoint(session, owner_id, model)
    known = {permission.project_id: permission for permission in session.scalars(_permissions(checkpoint))}
    for project_id in project_ids:
        if project_id not in known:
            known[project_id] = CheckpointPermission(
                job_id=checkpoint.job_id, step=checkpoint.step, project_id=project_id
            )
            session.add(known[project_id])
    session.flush()
    return Page([known[project_id] for project_id in dict.fromkeys(project_ids)], has_more=False)


def list_permissions(
    session: Session,
    owner_id: str,
    model: str,
    project_id: str | None,
    after: str | None,
    limit: int,
    *,
    ascending: bool,
) -> Page[CheckpointPermission]:
    """Return one page of a checkpoint's permissions; of all projects if `project_id` is None."""
    checkpoint = _checkpoint(session, owner_id, model)
    query = _permissions(checkpoint)
    if project_id is not None:
        query = query.where(CheckpointPermission.project_id == project_id)
    left = (select_deleted_position(checkpoint.id, after),)
    return page(session, query, CheckpointPermission, after, limit, ascending=ascending, left=left)


def withdraw(session: Session, project_id: str, model: str, permission_id: str) -> CheckpointPermission:
    """Delete a permission."""
    checkpoint = _checkpoint(session, project_id, model)
    permission = session.scalar(_permissions(checkpoint).where(CheckpointPermission.id == permission_id))
    if permission is None:
        raise NotFound(f"No such permission: {permission_id}", code="permission_not_found", param="permission_id")
    note_deleted(session, checkpoint.id, permission.id, permission.created_at)
    session.delete(permission)
    return permission


def _checkpoint(session: Session, project_id: str, model: str) -> JobCheckpoint:
    """Return the checkpoint of this name; raise `NotFound` if the project has none."""
    if found := project_models.find_checkpoint(session, project_id, model):
        return found[1]
    raise NotFound(f"The checkpoint {model[:200]!r} does not exist.", code="checkpoint_not_found", param="model")


def _forget_weights(session: Session, project_id: str, model: str) -> bool:
    """Remove the archive from a checkpoint's row and schedule its deletion; return False if it has none.

    A checkpoint that was deleted before, but whose bytes remain, has none: `delete_model` continues with these bytes.
    """
    if found := project_models.find_checkpoint(session, project_id, model):
        # Lock the job: no new job can start from the checkpoint while its weights are deleted.
        session.execute(select(Job.id).where(Job.id == found[0].id).with_for_update())
        found = project_models.find_checkpoint(session, project_id, model)  # it may have been deleted while we waited
    if found is None or found[1].storage_key is None:
        return False
    job, checkpoint = found
    project_models.check_unneeded(session, job)
    size = checkpoint.bytes or 0
    objects.condemn(session, found[1].storage_key, project_id=project_id, subject=model, bytes=size)
    served_adapters.condemn_job(session, job.id, checkpoint.sha256)
    checkpoint.storage_key = checkpoint.sha256 = checkpoint.bytes = None
    audit_log.record(session, "model.deleted", checkpoint.id)
    return True


def _not_there(job: Job, checkpoint: JobCheckpoint) -> AppError:
    """Return the error that explains why a checkpoint has no archive to download."""
    if checkpoint.kind is None:
        message = f"{checkpoint.id} is a step of a job that kept no adapter for it."
    elif checkpoint.safety is None:
        why = project_models.why_not_audited(job, checkpoint)
        message = f"{checkpoint.id} was not audited, so its adapter is not released. {why}"
    elif project_models.is_passed(checkpoint):
        return InvalidState(f"The adapter of {checkpoint.id} was deleted or not kept.", code="model_deleted")
    else:
        reasons = " ".join(checkpoint.safety["gate"].get("reasons", []))
        message = f"The audit of {checkpoint.id} did not pass, so its adapter is not released. {reasons}"
        return InvalidState(message.strip(), code="safety_gate_failed")
    return InvalidState(message, code="not_published")


def _permissions(checkpoint: JobCheckpoint) -> Select[CheckpointPermission]:
    of_checkpoint = (CheckpointPermission.job_id == checkpoint.job_id) & (CheckpointPermission.step == checkpoint.step)
    return select(CheckpointPermission).where(of_checkpoint)


def _checkpoint_response(job: Job, checkpoint: JobCheckpoint) -> CheckpointOut:
    return CheckpointOut(
        id=checkpoint.id,
        created_at=checkpoint.created_at,
        fine_tuned_model_checkpoint=project_models.checkpoint_name(job, checkpoint),
        fine_tuning_job_id=job.id,
        step_number=checkpoint.step,
        metrics=cast(CheckpointMetrics, {"step": checkpoint.step, **checkpoint.metrics}),
        safety=checkpoint.safety,
        not_audited=project_models.why_not_audited(job, checkpoint),
    )
