"""Delete what is not needed any more: expired rows, expired and deleted files, and abandoned attempts.

Rows decide which bytes are deleted, never a listing of the storage. Every step can be repeated, and any number of
processes may sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from threading import Event

from sqlalchemy import Engine, Select, delete, or_, select, tuple_
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningDelete

from app import db, objects, uploads
from app.db import Begin, now, timestamp
from app.db.base import utc_now
from app.db.tables import (
    TERMINAL,
    BrowserSession,
    DeletedPlace,
    File,
    IdempotencyKey,
    Job,
    Outbox,
    StoredReply,
    SweptJob,
    WebhookDelivery,
    WorkerRow,
)
from app.files import service as files
from app.objects import reconciler
from app.objects.reconciler import kept_attempts
from app.ops.lifecycle import repeat
from app.storage import Storage

_AT_ONCE = 100
_ATTEMPTS_STAY = timedelta(days=1)  # a worker that lost its lease may still write
_RESUMED = ("checkpoints", "stage")  # folders of an attempt with its resume state
_DELIVERIES_STAY = timedelta(days=30)


class RetentionLoop:
    """Sweeps periodically, and every `check_every` compares rows and storage, which only reports."""

    def __init__(self, engine: Engine, storage: Storage, check_every: timedelta) -> None:
        self._storage, self._begin, self._check_every = storage, partial(db.transaction, engine), check_every

    def run(self, stop: Event, every_s: float = 600.0) -> None:
        """Sweep every `every_s` seconds until `stop` is set."""
        repeat(self.sweep, stop, every_s, "not all could be swept; trying again")

    def sweep(self) -> None:
        """Sweep once, and compare rows and storage if that is due."""
        sweep(self._storage, self._begin)
        with self._begin() as session:
            is_due = reconciler.claim_check(session, self._check_every)
        if is_due:
            reconciler.check(self._storage, self._begin)


def sweep(storage: Storage, begin: Begin) -> None:
    """Delete what is due, at most a hundred of each kind."""
    sweep_files(begin)
    sweep_attempts(begin)
    with begin() as session:
        uploads.expire(session)
    mark = reconciler.renew_mark_if_due(storage, begin)
    # A database restored from a backup has intents of writes that were finished since; nothing is given up then.
    objects.sweep(storage, begin, give_up=reconciler.is_trusted(mark))
    prune(begin)
    with begin() as session:
        is_old = WebhookDelivery.created_at < db.clock(session) - _DELIVERIES_STAY
        session.execute(delete(WebhookDelivery).where(is_old, WebhookDelivery.status != "pending"))


def sweep_files(begin: Begin) -> None:
    """Delete expired files that no unfinished job needs."""
    with begin() as session:
        for file in session.scalars(_select_expired()):
            files.condemn(session, file)


def sweep_attempts(begin: Begin, stay: timedelta = _ATTEMPTS_STAY) -> None:
    """Delete abandoned attempts and resume states of jobs that ended at least `stay` ago.

    Attempts with results or a held adapter are kept.
    """
    with begin() as session:
        is_over = Job.status.in_(TERMINAL) & (Job.finished_at < db.clock(session) - stay)
        due = select(Job).where(is_over, Job.id.not_in(select(SweptJob.job_id))).limit(_AT_ONCE)
        for job in session.scalars(due.with_for_update(skip_locked=True)):
            # In the same transaction: each job is swept once, by whichever process locked it.
            session.add(SweptJob(job_id=job.id))
            for prefix in _abandoned_prefixes(session, job):
                objects.condemn_prefix(session, prefix, project_id=job.project_id, subject=job.id)
            for file in job.checkpoint["files"] if job.checkpoint else ():
                objects.condemn(session, file["key"], project_id=job.project_id, subject=job.id)


def _select_expired() -> Select[File]:
    needed = select(Job.id).where(
        Job.project_id == File.project_id,
        or_(Job.training_file == File.id, Job.validation_file == File.id),
        Job.status.not_in(TERMINAL),
    )
    is_due = (File.expires_at <= timestamp()) & ~needed.exists()
    return select(File).where(is_due).limit(_AT_ONCE).with_for_update(skip_locked=True)


def _abandoned_prefixes(session: Session, job: Job) -> Iterator[str]:
    """Yield the prefixes to delete of an ended job: abandoned attempts, and the resume states of kept attempts."""
    kept = kept_attempts(session, job)
    for token in range(1, job.lease_token + 1):
        prefix = f"tenants/{job.project_id}/jobs/{job.id}/a{token}"
        yield from (f"{prefix}/{name}" for name in _RESUMED) if token in kept else (prefix,)


# Delete expired rows: sent wake-ups, idempotency keys, browser sessions, workers, stored replies, old positions.

_SENT_STAY = timedelta(hours=1)
KEYS_STAY = timedelta(days=30)  # a client that sends a request again does so within minutes
_GONE_S = 86_400.0  # since a worker was last seen
_PLACES_STAY = timedelta(days=30)
_ROWS_AT_ONCE = 1000


def prune(begin: Begin) -> None:
    """Delete all expired rows, a thousand in a transaction, so that no transaction is long."""
    for removal in (_delete_sent(), _keys(), _sign_ins(), _workers(), _replies(), _places()):
        removed = _ROWS_AT_ONCE
        while removed == _ROWS_AT_ONCE:
            with begin() as session:
                removed = len(session.execute(removal).all())


def _delete_sent() -> ReturningDelete[tuple[int]]:
    due = select(Outbox.id).where(Outbox.sent_at < utc_now() - _SENT_STAY).limit(_ROWS_AT_ONCE)
    return delete(Outbox).where(Outbox.id.in_(due)).returning(Outbox.id)


def _keys() -> ReturningDelete[tuple[str]]:
    key = (IdempotencyKey.project_id, IdempotencyKey.key)
    due = select(*key).where(IdempotencyKey.created_at < utc_now() - KEYS_STAY).limit(_ROWS_AT_ONCE)
    return delete(IdempotencyKey).where(tuple_(*key).in_(due)).returning(IdempotencyKey.key)


def _sign_ins() -> ReturningDelete[tuple[str]]:
    due = select(BrowserSession.digest).where(BrowserSession.expires_at < timestamp()).limit(_ROWS_AT_ONCE)
    return delete(BrowserSession).where(BrowserSession.digest.in_(due)).returning(BrowserSession.digest)


def _workers() -> ReturningDelete[tuple[str]]:
    due = select(WorkerRow.name).where(WorkerRow.seen_at < now() - _GONE_S).limit(_ROWS_AT_ONCE)
    return delete(WorkerRow).where(WorkerRow.name.in_(due)).returning(WorkerRow.name)


def _replies() -> ReturningDelete[tuple[str]]:
    due = select(StoredReply.id).where(StoredReply.expires_at < timestamp()).limit(_ROWS_AT_ONCE)
    return delete(StoredReply).where(StoredReply.id.in_(due)).returning(StoredReply.id)


def _places() -> ReturningDelete[tuple[str]]:
    due = select(DeletedPlace.id).where(DeletedPlace.deleted_at < utc_now() - _PLACES_STAY).limit(_ROWS_AT_ONCE)
    return delete(DeletedPlace).where(DeletedPlace.id.in_(due)).returning(DeletedPlace.id)
