"""Hand back the jobs of lost workers and fail overdue jobs; any number of processes may run it."""

from __future__ import annotations

import logging
import time
from functools import partial
from threading import Event

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from app.db import now, transaction
from app.db.tables import Job, JobStatus
from app.jobs import events, transitions
from app.jobs.lease import OVERDUE
from app.ops.lifecycle import repeat

log = logging.getLogger(__name__)

_AT_ONCE_S = 1.0  # a transaction that takes longer to begin has waited for a lock


def run(engine: Engine, stop: Event, every_s: float) -> None:
    """Reap every `every_s` seconds until `stop` is set."""
    repeat(partial(reap_once, engine, Rounds()), stop, every_s, "could not reap")


class Rounds:
    """Skips reaping while another program keeps SQLite's write lock.

    Heartbeats wait for that lock as well, so leases expire although their workers are alive. After the lock is free,
    one more round is skipped to let workers extend their leases.
    """

    def __init__(self) -> None:
        self._was_locked = False

    def begin(self, session: Session) -> bool:
        """Begin the transaction; return True if this round may reap."""
        if session.get_bind().dialect.name != "sqlite":
            return True
        was_locked, self._was_locked = self._was_locked, True  # kept if the next line raises
        began = time.monotonic()
        session.connection()
        self._was_locked = time.monotonic() - began > _AT_ONCE_S
        return not (was_locked or self._was_locked)


def reap_once(engine: Engine, rounds: Rounds | None = None) -> list[str]:
    """Reap once, for all workers; return the ids of the jobs that were handed back or failed."""
    with transaction(engine) as session:
        reaped = reap(session) if (rounds or Rounds()).begin(session) else []
    if reaped:
        log.warning("reaped %s", ", ".join(reaped))
    return reaped


def reap(session: Session) -> list[str]:
    """Fail every overdue job, and hand back every job whose lease has expired; return their ids.

    An overdue job with a pending cancel is cancelled. Two reapers never take the same job.
    """
    is_lost = (Job.status == JobStatus.running) & (Job.lease_expires_at < now())
    # A paused job has no deadline: pausing clears it.
    is_overdue = Job.status.in_([JobStatus.queued, JobStatus.running]) & (Job.deadline_at < now())
    overdue = set()
    for job in transitions.lock_jobs(session, is_overdue, skip_locked=True).all():
        overdue.add(job.id)
        if job.cancel_requested_at:
            transitions.to_cancelled(session, job)
        else:
            transitions.to_failed(session, job, OVERDUE)
    # Overdue jobs are failed first, so this query no longer matches them.
    lost = transitions.lock_jobs(session, is_lost, skip_locked=True).all()
    for job in lost:
        transitions.hand_back(session, job, events.LEASE_EXPIRED)
    return sorted(overdue | {job.id for job in lost})
