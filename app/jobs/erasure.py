"""What a customer takes back: a fine-tuned model, or a job with all that it made.

Rows go first, in one transaction, and leave a tombstone with digests; then bytes. When the storage fails, the client is
told, and asking again removes what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.checkpoints.models import CheckpointPermission, JobCheckpoint
from app.errors import Forbidden, InvalidState, NotFound
from app.files import service as files
from app.files.upload import Begin
from app.jobs import lineage
from app.jobs import service as jobs
from app.jobs.models import DeletedModel, SweptJob, Tombstone
from app.jobs.schemas import JobDeleted, ModelDeleted
from app.models import TERMINAL, AuditResult, BaseModelEntry, File, IdempotencyKey, Job, JobEvent, JobMetric
from app.storage import Storage
from app.waivers.models import HeldAdapter, Waiver

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
)


@dataclass(frozen=True, slots=True)
class _Erased:
    """What the rows were, and which objects they named."""

    tombstone: Tombstone
    files: list[str]
    keys: list[str]


def delete_model(storage: Storage, begin: Begin, tenant_id: str, model: str) -> ModelDeleted:
    """Delete a fine-tuned model: its archive goes, the job and its report stay."""
    with begin() as session:
        job = _job_of(session, tenant_id, model)
        lineage.check_unneeded(session, job)
        session.add(DeletedModel(job_id=job.id))
        key = (job.adapter or {}).get("storage_key", "")
        session.execute(delete(File).where(File.tenant_id == tenant_id, File.storage_key == key))
        audit_log.record(session, "model.deleted", job.id)
    if key:
        storage.delete(key)
    return ModelDeleted(id=model)


def erase(storage: Storage, begin: Begin, tenant_id: str, job_id: str, *, include_files: bool) -> JobDeleted:
    """Erase an ended job; with `include_files`, the files it was trained on too, unless another job needs them."""
    with begin() as session:
        erased = _again(session, tenant_id, job_id) or _erase(session, tenant_id, job_id, include_files)
    for key in erased.keys:
        storage.delete(key)
    storage.delete_prefix(f"tenants/{tenant_id}/jobs/{job_id}")
    tombstone = erased.tombstone
    return JobDeleted(
        id=job_id,
        erased_at=tombstone.erased_at,
        status=tombstone.status,
        digests=tombstone.digests,
        deleted_files=erased.files,
    )


def _job_of(session: Session, tenant_id: str, model: str) -> Job:
    """The job whose model this is, locked."""
    if session.get(BaseModelEntry, model):
        raise Forbidden(f"{model} is a base model of the provider's.", code="base_model", param="model")
    query = select(Job).where(Job.tenant_id == tenant_id, Job.fine_tuned_model == model)
    job = session.scalar(query.with_for_update())
    if job is None or session.get(DeletedModel, job.id) is not None:
        raise NotFound(f"The model '{model}' does not exist.", code="model_not_found", param="model")
    return job


def _again(session: Session, tenant_id: str, job_id: str) -> _Erased | None:
    """What is known of a job that was erased before."""
    query = select(Tombstone).where(Tombstone.tenant_id == tenant_id, Tombstone.job_id == job_id)
    tombstone = session.scalar(query)
    return _Erased(tombstone, [], []) if tombstone else None


def _erase(session: Session, tenant_id: str, job_id: str, include_files: bool) -> _Erased:
    session.execute(select(Job.id).where(Job.tenant_id == tenant_id, Job.id == job_id).with_for_update())
    job = jobs.get(session, tenant_id, job_id)
    if job.status not in TERMINAL:
        raise InvalidState(f"Job {job.id} is {job.status}; cancel it first.")
    lineage.check_unneeded(session, job)
    results = _rows(session, tenant_id, job.result_files or [])
    asked_files = _rows(session, tenant_id, filter(None, (job.training_file, job.validation_file)))
    own = [key for key in ((job.adapter or {}).get("storage_key"), job.report_key) if key]
    tombstone = _tombstone(job)
    session.add(tombstone)
    session.flush()
    for part in _PARTS:
        session.execute(delete(part).where(part.job_id == job.id))
    session.delete(job)
    session.flush()
    gone = results + (_unused(session, tenant_id, asked_files) if include_files else [])
    for file in gone:
        session.delete(file)
    audit_log.record(session, "job.erased", tombstone.job_id, files=[file.id for file in gone])
    return _Erased(tombstone, [file.id for file in gone], own + [file.storage_key for file in gone])


def _tombstone(job: Job) -> Tombstone:
    return Tombstone(
        job_id=job.id,
        tenant_id=job.tenant_id,
        created_at=job.created_at,
        finished_at=job.finished_at,
        status=job.status.value,
        gpu_seconds=job.gpu_seconds,
        trained_tokens=job.trained_tokens,
        digests=_digests(job),
    )


def _digests(job: Job) -> dict[str, Any]:
    """Enough to recognise what was erased, nothing to restore it from."""
    named = {name: job.spec.get(name) for name in ("training_file", "validation_file", "pool")} | {
        "adapter": job.adapter
    }
    return {"request": job.request_hash} | {name: (each or {}).get("sha256") for name, each in named.items()}


def _rows(session: Session, tenant_id: str, ids: Iterable[str]) -> list[File]:
    return list(session.scalars(select(File).where(File.tenant_id == tenant_id, File.id.in_(list(ids)))))


def _unused(session: Session, tenant_id: str, candidates: Iterable[File]) -> list[File]:
    return [file for file in candidates if files.user_of(session, tenant_id, file.id) is None]
