"""Recognize a request for a job that was sent before, by its idempotency key or as a client's automatic retry."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app import audit_log, db, quotas
from app.db import Begin
from app.db.tables import ApiKey, IdempotencyKey, Job
from app.errors import InvalidRequest
from app.keys.service import Principal

_RETRY_WINDOW = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Submission:
    """How a request was sent: its idempotency key, if any, and the client's retry count."""

    idempotency_key: str | None
    retry_count: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The job that another one is cloned from, and the digest of the clone request."""

    job_id: str
    digest: str


def earlier(session: Session, caller: Principal, submission: Submission, digest: str, job_id: str) -> Job | None:
    """Return the job that an earlier sending of the request made; None for a new request.

    Locks the API key's row, so that of two concurrent sendings one waits for the other. `job_id` is reserved for the
    new job under the idempotency key.
    """
    # FOR NO KEY UPDATE: other rows that reference the key can still be inserted meanwhile.
    lock = select(ApiKey.id).where(ApiKey.id == caller.key_id).with_for_update(key_share=True)
    session.execute(lock)
    if submission.idempotency_key is not None:
        return _reserve(session, caller, submission.idempotency_key, digest, job_id)
    return _find_retried_job(session, caller, digest) if submission.retry_count > 0 else None


def require_room(look: Begin, caller: Principal, digest: str, submission: Submission) -> None:
    """Raise `QuotaExceeded` if the project may have no further job, before a row is locked or files are read.

    A request that was sent before passes, because its answer is the job that exists.
    """
    with look() as reader:
        if not is_repeated(reader, caller, submission, digest):
            quotas.check_job_without_lock(reader, caller.project_id)


def is_repeated(reader: Session, caller: Principal, submission: Submission, digest: str) -> bool:
    """Return True, without taking a lock, if an earlier sending may have made the job; `earlier` decides."""
    if submission.idempotency_key is not None:
        return reader.get(IdempotencyKey, (caller.project_id, submission.idempotency_key)) is not None
    return submission.retry_count > 0 and _find_retried_job(reader, caller, digest) is not None


def _find_retried_job(session: Session, caller: Principal, digest: str) -> Job | None:
    """Return the job that the same request with the same key made within the last 15 minutes."""
    same = (Job.key_id == caller.key_id) & (Job.request_hash == digest)
    recent = Job.created_at > db.clock(session) - _RETRY_WINDOW
    query = select(Job).where(Job.project_id == caller.project_id, same, recent)
    return session.scalar(query.order_by(Job.created_at.desc()).limit(1))


def record(session: Session, job: Job, origin: Origin | None) -> None:
    """Record in the audit log who created the job; for a clone also the cloned job and the training file."""
    digest = job.request_hash
    if origin is None:
        audit_log.record(session, "job.created", job.id, request_sha256=digest)
        return
    cloned, file = origin.job_id, job.training_file
    audit_log.record(session, "job.created", job.id, request_sha256=digest, cloned_from=cloned, training_file=file)


def _reserve(session: Session, caller: Principal, key: str, digest: str, job_id: str) -> Job | None:
    """Reserve the idempotency key for this job; return the earlier job if the key was used for the same request."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    row = {"project_id": caller.project_id, "key": key, "request_hash": digest, "job_id": job_id}
    # Of two concurrent inserts, the second waits for the first transaction and then finds its row below.
    session.execute(dialect.insert(IdempotencyKey).values(**row).on_conflict_do_nothing())
    taken = session.get_one(IdempotencyKey, (caller.project_id, key))
    if taken.job_id == job_id:
        return None
    if taken.request_hash != digest:
        message = "This Idempotency-Key was used for another request; take a new one."
        raise InvalidRequest(message, code="idempotency_mismatch", param="Idempotency-Key")
    return session.get_one(Job, taken.job_id)
