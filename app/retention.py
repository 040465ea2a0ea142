"""Bytes that nobody needs any more are removed: of expired and deleted files, of attempts that came to nothing.

What is removed is decided by rows, never by listing; every step can be repeated, and any number of processes may sweep.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from threading import Event

from sqlalchemy import Engine, Select, delete, or_, select
from sqlalchemy.orm import Session

from app import db
from app.db import timestamp
from app.files import service as files
from app.files.models import CondemnedObject
from app.files.upload import Begin
from app.jobs.models import SweptJob
from app.models import TERMINAL, File, Job, utc_now
from app.storage import Storage
from app.uploads import parts
from app.waivers.models import HeldAdapter
from app.webhooks.models import WebhookDelivery

_AT_ONCE = 100
_ATTEMPTS_STAY = timedelta(days=1)  # a worker that was thought dead may still write
_DELIVERIES_STAY = timedelta(days=30)
_OF_ATTEMPT = re.compile(r"tenants/[^/]+/jobs/[^/]+/a([0-9]+)/")

log = logging.getLogger(__name__)


class Sweeper:
    """For a thread of its own."""

    def __init__(self, engine: Engine, storage: Storage) -> None:
        self._begin, self._storage = partial(db.transaction, engine), storage

    def run(self, stop: Event, every_s: float = 600.0) -> None:
        """Sweep from time to time until told to stop."""
        while not stop.wait(every_s):
            try:
                sweep(self._storage, self._begin)
            except Exception:
                log.exception("not all could be swept; trying again")


def sweep(storage: Storage, begin: Begin) -> None:
    """One round: everything that is due, a hundred of each kind at most."""
    sweep_files(storage, begin)
    sweep_attempts(storage, begin)
    parts.sweep(storage, begin)
    with begin() as session:
        is_old = WebhookDelivery.created_at < utc_now() - _DELIVERIES_STAY
        session.execute(delete(WebhookDelivery).where(is_old, WebhookDelivery.status != "pending"))


def sweep_files(storage: Storage, begin: Begin) -> None:
    """Expired files that no unfinished job needs go as if they were deleted; then the bytes of all that were."""
    with begin() as session:
        for file in session.scalars(_expired()):
            files.condemn(session, file)
    with begin() as session:
        keys = session.scalars(select(CondemnedObject.storage_key).limit(_AT_ONCE)).all()
    for key in keys:
        storage.delete(key)
        with begin() as session:
            session.execute(delete(CondemnedObject).where(CondemnedObject.storage_key == key))


def sweep_attempts(storage: Storage, begin: Begin, stay: timedelta = _ATTEMPTS_STAY) -> None:
    """Folders of attempts of jobs that ended long enough ago, but none with what is published or held for a waiver."""
    with begin() as session:
        is_over = Job.status.in_(TERMINAL) & (Job.finished_at < utc_now() - stay)
        query = select(Job).where(is_over, Job.id.not_in(select(SweptJob.job_id))).limit(_AT_ONCE)
        due = [(job.id, list(_abandoned(session, job))) for job in session.scalars(query)]
    for job_id, prefixes in due:
        for prefix in prefixes:
            storage.delete_prefix(prefix)
        with begin() as session:
            if session.get(Job, job_id, with_for_update=True) and not session.get(SweptJob, job_id):
                session.add(SweptJob(job_id=job_id))


def _expired() -> Select[File]:
    needed = select(Job.id).where(
        Job.tenant_id == File.tenant_id,
        or_(Job.training_file == File.id, Job.validation_file == File.id),
        Job.status.not_in(TERMINAL),
    )
    is_due = (File.expires_at <= timestamp()) & ~needed.exists()
    return select(File).where(is_due).limit(_AT_ONCE).with_for_update(skip_locked=True)


def _abandoned(session: Session, job: Job) -> Iterator[str]:
    results = session.scalars(select(File.storage_key).where(File.id.in_(job.result_files or [])))
    held = session.get(HeldAdapter, job.id)
    published = [*results, job.report_key or "", (job.adapter or {}).get("storage_key", ""), held and held.storage_key]
    kept = {int(match.group(1)) for key in published if (match := _OF_ATTEMPT.match(key or ""))}
    for token in range(1, job.lease_token + 1):
        if token not in kept:
            yield f"tenants/{job.tenant_id}/jobs/{job.id}/a{token}"
