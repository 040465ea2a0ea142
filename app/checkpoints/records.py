"""Record the checkpoints that a worker writes: each once, and only the last three are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from app import objects
from app.db.tables import TERMINAL, CheckpointPermission, Job, JobCheckpoint
from app.db.tables.job_records import Adapter, CheckpointSafety
from app.db.tables.jobs import EPOCH, FINAL, KEPT_CHECKPOINTS
from app.http.pagination import note_deleted
from app.jobs import lease
from app.jobs.lease import Claim


@dataclass(frozen=True, slots=True)
class EpochResult:
    """The checkpoint of an epoch; `safety` is None if it was not audited, `archive` if its adapter is not kept."""

    kind: str
    metrics: Mapping[str, float | None]
    safety: CheckpointSafety | None
    archive: Adapter | None


def record(session: Session, claim: Claim, results: Mapping[int, EpochResult]) -> bool:
    """Store checkpoints by step, and remove those before the last three; return False if the lease is lost.

    An existing checkpoint stays: an attempt that does not know whether its write succeeded may write again.
    """
    if not results:
        return True
    if not lease.holds(session, claim):
        return False
    job = session.get_one(Job, claim.job_id)
    for step, result in results.items():
        row = session.get(JobCheckpoint, (claim.job_id, step)) or JobCheckpoint(job_id=claim.job_id, step=step)
        if row.kind is None:
            _fill(row, result)
            session.add(row)
        elif result.kind == FINAL and row.kind == EPOCH:
            _make_final(session, job, row, result)
        elif result.safety and row.kind == EPOCH and row.safety is None:  # kept after all, and audited since
            _fill(row, result)
        elif result.archive and result.archive["storage_key"] != row.storage_key:
            _condemn(session, job, result.archive["storage_key"])
    session.flush()
    _remove_old(session, job)
    return True


def last_stored_step(session: Session, job_id: str) -> int:
    """Return the last step whose checkpoint is stored; 0 if there is none."""
    of_job = (JobCheckpoint.job_id == job_id) & (JobCheckpoint.kind == EPOCH)
    return session.scalar(select(func.max(JobCheckpoint.step)).where(of_job)) or 0


def is_known(session: Session, job_id: str, step: int) -> bool:
    """Return True if the checkpoint of this step is stored."""
    row = session.get(JobCheckpoint, (job_id, step))
    return row is not None and row.kind is not None


def _condemn(session: Session, job: Job, storage_key: str) -> None:
    objects.condemn(session, storage_key, project_id=job.project_id, subject=job.id)


def _fill(row: JobCheckpoint, result: EpochResult) -> None:
    row.kind, row.metrics, row.safety = result.kind, dict(result.metrics), result.safety
    if result.archive:
        row.storage_key, row.sha256 = result.archive["storage_key"], result.archive["sha256"]
        row.bytes = result.archive["bytes"]


def _make_final(session: Session, job: Job, row: JobCheckpoint, result: EpochResult) -> None:
    """Make a checkpoint stand for the job's own adapter: its row gets the full audit, and its archive is deleted.

    An archive that an unfinished job starts from is kept; the reconciler removes it later.
    """
    if row.storage_key is not None and not _is_needed(session, row.storage_key):
        _condemn(session, job, row.storage_key)
    row.storage_key = row.sha256 = row.bytes = None
    _fill(row, result)


def _remove_old(session: Session, job: Job) -> None:
    """Remove all but the final checkpoint and the last of the others.

    A checkpoint that an unfinished job starts from is kept.
    """
    of_job = (JobCheckpoint.job_id == job.id) & JobCheckpoint.kind.is_not(None)
    is_own = JobCheckpoint.kind == FINAL
    own_first = select(JobCheckpoint).where(of_job).order_by(is_own.desc(), JobCheckpoint.step.desc())
    # The final checkpoint sorts first, so it is never among those that are removed.
    for row in session.scalars(own_first.offset(KEPT_CHECKPOINTS)).all():
        if row.storage_key is not None:
            if _is_needed(session, row.storage_key):
                continue
            _condemn(session, job, row.storage_key)
        permissions = (CheckpointPermission.job_id == job.id) & (CheckpointPermission.step == row.step)
        session.execute(delete(CheckpointPermission).where(permissions))
        note_deleted(session, job.id, row.id, row.created_at)
        session.delete(row)
    session.flush()


def _is_needed(session: Session, storage_key: str) -> bool:
    starts_from = Job.spec["start_from"]["storage_key"].as_string() == storage_key
    return session.scalar(select(Job.id).where(Job.status.not_in(TERMINAL), starts_from).limit(1)) is not None
