"""Delete a fine-tuned model, a file, or a job with everything it made.

Rows are deleted first, in one transaction that leaves a tombstone with digests and an intent to delete each object;
then the objects' bytes. If the storage fails, the request fails, and a repeated request or the next sweep deletes the
rest. The API confirms a deletion only when no byte is left.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app import audit_log, objects
from app.db import Begin
from app.db.tables import (
    TERMINAL,
    AuditResult,
    BaseModelEntry,
    CheckpointPermission,
    DeletedModel,
    File,
    HeldAdapter,
    IdempotencyKey,
    Job,
    JobCheckpoint,
    JobEvent,
    JobMetric,
    LaterAudit,
    ReplyLabel,
    SampledReply,
    ServedAdapter,
    StoredReply,
    SweptJob,
    Tombstone,
    Waiver,
)
from app.errors import Forbidden, InvalidState, NotFound
from app.files import service as files
from app.files.schemas import FileDeleted
from app.http.pagination import note_deleted
from app.jobs import later_outcomes, project_models
from app.jobs import service as jobs
from app.jobs.schemas import JobDeleted, ModelDeleted
from app.objects import served_adapters
from app.storage import Storage

_PARTS = (
    JobEvent,
    JobMetric,
    JobCheckpoint,
    CheckpointPermission,
    AuditResult,
    DeletedModel,
    SweptJob,
    IdempotencyKey,
    HeldAdapter,
    Waiver,
    LaterAudit,
    StoredReply,
    ReplyLabel,
    SampledReply,
)


def delete_model(storage: Storage, begin: Begin, project_id: str, model: str) -> ModelDeleted:
    """Delete a fine-tuned model's archive; its job and report stay."""
    with begin() as session:
        # A repeated request finds the rows deleted already, and only finishes what the first one could not.
        if not objects.has_deletions(session, project_id, model) and not _is_loaded(session, project_id, model):
            _forget_model(session, project_id, model)
        job_id = session.scalar(select(Job.id).where(Job.project_id == project_id, Job.fine_tuned_model == model))
    objects.perform(storage, begin, model)
    if job_id is not None:
        served_adapters.require_unloaded(begin, job_id)
    return ModelDeleted(id=model)


def delete_file(storage: Storage, begin: Begin, project_id: str, file_id: str) -> FileDeleted:
    """Delete a file that no unfinished job needs.

    Raises `InvalidState` for the archive of a model: clearing old files must not delete a model.
    """
    with begin() as session:
        if not objects.has_deletions(session, project_id, file_id):
            job_id = jobs.adapter_job(session, files.get(session, project_id, file_id))
            if job_id is not None and session.get(DeletedModel, job_id) is None:
                model = session.get_one(Job, job_id).fine_tuned_model or f"the model of {job_id}"
                raise InvalidState(f"{file_id} is the archive of {model}; it is deleted with the model.")
            files.forget(session, project_id, file_id)
    objects.perform(storage, begin, file_id)
    return FileDeleted(id=file_id)


def erase(storage: Storage, begin: Begin, project_id: str, job_id: str, *, include_files: bool) -> JobDeleted:
    """Erase a job that has ended and everything it made.

    With `include_files`, its training and validation files are erased too, unless an unfinished job needs them. Raises
    `InvalidState` for a job that has not ended, or whose adapter an unfinished job starts from.
    """
    with begin() as session:
        tombstone = _again(session, project_id, job_id) or _erase(session, project_id, job_id, include_files)
    objects.perform(storage, begin, job_id)
    served_adapters.require_unloaded(begin, job_id)
    return JobDeleted(
        id=job_id,
        erased_at=tombstone.erased_at,
        status=tombstone.status,
        digests=tombstone.digests,
        deleted_files=tombstone.deleted_files or [],
    )


def _forget_model(session: Session, project_id: str, model: str) -> None:
    job = _lock_job(session, project_id, model)
    project_models.check_unneeded(session, job)
    if session.get(DeletedModel, job.id) is None:
        session.add(DeletedModel(job_id=job.id))
    if job.adapter:
        key, size = job.adapter["storage_key"], job.adapter["bytes"]
        # The archive is also listed as a result file; its row must go in the same transaction, or it points at deleted
        # bytes.
        own = delete(File).where(File.project_id == job.project_id, File.storage_key == key)
        for file_id, created_at in session.execute(own.returning(File.id, File.created_at)).all():
            note_deleted(session, job.project_id, file_id, created_at)
        objects.condemn(session, key, project_id=job.project_id, subject=model, bytes=size)
        served_adapters.condemn_job(session, job.id, job.adapter["sha256"])
    audit_log.record(session, "model.deleted", job.id)


def _is_loaded(session: Session, project_id: str, model: str) -> bool:
    """Return True if a server still holds a model that was deleted before."""
    own = select(DeletedModel.job_id).join(Job, Job.id == DeletedModel.job_id)
    deleted = own.where(Job.project_id == project_id, Job.fine_tuned_model == model)
    is_due = ServedAdapter.job_id.in_(deleted) & ServedAdapter.condemned_at.is_not(None)
    return session.scalar(select(ServedAdapter.sha256).where(is_due).limit(1)) is not None


def _lock_job(session: Session, project_id: str, model: str) -> Job:
    """Return the job that made this model, locked."""
    if session.get(BaseModelEntry, model):
        raise Forbidden(f"{model} is a base model of the provider's.", code="base_model", param="model")
    query = select(Job).where(Job.project_id == project_id, Job.fine_tuned_model == model)
    job = session.scalar(query.with_for_update())
    if job is None or session.get(DeletedModel, job.id) is not None:
        raise NotFound(f"The model '{model}' does not exist.", code="model_not_found", param="model")
    return job


def _again(session: Session, project_id: str, job_id: str) -> Tombstone | None:
    """Return the tombstone of a job that was erased before, or None."""
    return session.scalar(select(Tombstone).where(Tombstone.project_id == project_id, Tombstone.job_id == job_id))


def _erase(session: Session, project_id: str, job_id: str, include_files: bool) -> Tombstone:
    # Locked before it is read: neither a worker nor another request may change the job from here on.
    session.execute(select(Job.id).where(Job.project_id == project_id, Job.id == job_id).with_for_update())
    job = jobs.get(session, project_id, job_id)
    if job.status not in TERMINAL:
        todo = "its worker is about to stop; try again in a moment" if job.cancel_requested_at else "cancel it first"
        raise InvalidState(f"Job {job.id} is {job.public_status}; {todo}.")
    project_models.check_unneeded(session, job)
    later_outcomes.forget(session, job.id)
    results = _rows(session, project_id, job.result_files or [])
    asked_files = _rows(session, project_id, filter(None, (job.training_file, job.validation_file)))
    checkpoints = session.scalars(select(JobCheckpoint.storage_key).where(JobCheckpoint.job_id == job.id))
    own = [key for key in (job.adapter and job.adapter["storage_key"], job.report_key, *checkpoints) if key]
    # Attempts leave objects that no row references; the prefix covers them.
    prefix = f"tenants/{project_id}/jobs/{job.id}"
    # A database trigger lets a job's row be deleted only if its tombstone exists.
    tombstone = _tombstone(job)
    session.add(tombstone)
    session.flush()
    # Cursors of lists point at rows: the position of a deleted row is kept, so that a client's next page still begins
    # there.
    if held := session.get(HeldAdapter, job.id):
        note_deleted(session, HeldAdapter.__tablename__, job.id, held.created_at)
    for part in _PARTS:
        session.execute(delete(part).where(part.job_id == job.id))
    session.delete(job)
    session.flush()
    gone = results + (_unused_files(session, project_id, asked_files) if include_files else [])
    for file in gone:
        files.condemn(session, file, subject=job_id)
    for key in own:
        objects.condemn(session, key, project_id=project_id, subject=job_id)
    objects.condemn_prefix(session, prefix, project_id=project_id, subject=job_id)
    served_adapters.condemn_job(session, job_id)
    tombstone.deleted_files = [file.id for file in gone]
    audit_log.record(session, "job.erased", tombstone.job_id, files=tombstone.deleted_files)
    return tombstone


def _tombstone(job: Job) -> Tombstone:
    return Tombstone(
        job_id=job.id,
        project_id=job.project_id,
        created_at=job.created_at,
        finished_at=job.finished_at,
        status=job.status.value,
        gpu_seconds=job.gpu_seconds,
        trained_tokens=job.trained_tokens,
        digests=_digests(job),
    )


def _digests(job: Job) -> dict[str, str | None]:
    """Return digests that identify what was erased but cannot restore it."""
    spec, adapter = job.spec, job.adapter
    return {
        "request": job.request_hash,
        "training_file": spec.training_file.sha256,
        "validation_file": spec.validation_file.sha256 if spec.validation_file else None,
        "pool": spec.pool.sha256 if spec.pool else None,
        "adapter": adapter["sha256"] if adapter else None,
    }


def _rows(session: Session, project_id: str, ids: Iterable[str]) -> list[File]:
    return list(session.scalars(select(File).where(File.project_id == project_id, File.id.in_(list(ids)))))


def _unused_files(session: Session, project_id: str, candidates: Iterable[File]) -> list[File]:
    return [file for file in candidates if files.unfinished_job(session, project_id, file.id) is None]
