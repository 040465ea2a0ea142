"""Reconcile the cluster with the jobs' rows: start missing work, stop unneeded work, record why jobs wait.

Nothing is remembered between two calls, and any number of processes may reconcile. Only a job's row decides which
process works on it: a claim needs the token that the work was started for, and each claim raises the token. So work
that is started twice or too late does no harm, and each call repairs what the one before left. A cluster is used
through the protocol `Launcher`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from app.db import read, transaction
from app.db.tables import Job, JobStatus
from app.jobs import needs, scheduling
from app.jobs.needs import Room
from spard.models.memory import Need


class Away(Exception):
    """The cluster does not answer or is overloaded; the request may or may not have been carried out."""


class Refused(Exception):
    """The cluster refuses the request, and repeating it will not help."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt of a job, which can claim the job only while the lease's token is `token`.

    `gpus` is the number of GPUs of each of its `nodes`; None means as many as the pod template has.
    """

    job_id: str
    token: int
    gpus: int | None = None
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class ClusterWork:
    """Work that the cluster has.

    name, uid  of the cluster's object
    ended_s    seconds since it ended; None while it has not
    reason     why it does not start, in words for the job's owner; None if it does
    """

    name: str
    uid: str
    work: Work
    ended_s: float | None = None
    reason: str | None = None


class Launcher(Protocol):
    """Starts and stops work on a cluster. All methods are idempotent; all may raise `Away` or `Refused`."""

    def list_started(self) -> list[ClusterWork]:
        """Return all work that the cluster has; the list may be slightly outdated."""

    def start(self, work: Work) -> None:
        """Start work, unless the cluster has it already."""

    def stop(self, started: ClusterWork) -> None:
        """Stop the process of an attempt with SIGTERM, if the cluster still has it."""


log = logging.getLogger(__name__)

AGAIN_S = 60.0  # wait before work that ended without a claim is started again
REFUSED = "The cluster does not take its work."
TOO_LARGE = "No number of GPUs that a job may have has the memory for it."

_AT_ONCE = 500  # rows of one statement


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a launcher.

    jobs       the most jobs on the cluster, waiting or running
    gpu_bytes  memory of each GPU; None: unknown, and each job gets the GPUs of its template
    gpus       the most GPUs of a job on one node
    nodes      the most nodes of a job
    """

    jobs: int = 100
    gpu_bytes: int | None = None
    gpus: int = 8
    nodes: int = 1

    @property
    def room(self) -> Room:
        """The GPU memory that the largest possible job has."""
        return Room(self.gpu_bytes, self.gpus * self.nodes)

    @property
    def counts(self) -> list[int]:
        """The numbers of GPUs that a job on one node may have: powers of two below `gpus`, and `gpus`."""
        return [*(1 << power for power in range((self.gpus - 1).bit_length())), self.gpus]


def look(engine: Engine, launcher: Launcher, bounds: Bounds) -> None:
    """Reconcile once; if the cluster does not answer, log that and change nothing."""
    try:
        # The cluster is read before the rows, so every work that it has belongs to a row that existed by then.
        started = launcher.list_started()
        with read(engine) as session:
            rows = _rows(session, {each.work.job_id for each in started})
            asked = scheduling.next_jobs(session, bounds.jobs, bounds.room)
        kept = [each for each in started if is_needed(each, rows.get(each.work.job_id))]
        reasons = {each.work.job_id: each.reason for each in kept if each.ended_s is None}
        for each in started:
            if each not in kept and (each.ended_s is None or _is_queued(rows.get(each.work.job_id))):
                _stop(launcher, each)
        there = {(each.work.job_id, each.work.token) for each in started}
        missing = [job for job in asked if (job.id, job.lease_token) not in there]
        for job in missing[: max(0, bounds.jobs - len(reasons))]:
            reasons[job.id] = _start(launcher, next_work(job, bounds))
    except (Away, Refused) as error:
        log.warning("looked in vain: %s", error)
        return
    _tell(engine, reasons, bounds.room)


def is_needed(started: ClusterWork, job: Job | None) -> bool:
    """Return True if an attempt's process may hold its job or may still claim it, by status and token."""
    if job is None:
        return False
    if job.status == JobStatus.running:
        return started.work.token >= job.lease_token - 1  # the claim has raised the token by one
    is_over = started.ended_s is not None and started.ended_s > AGAIN_S
    return _is_queued(job) and started.work.token >= job.lease_token and not is_over


def next_work(job: Job, bounds: Bounds) -> Work:
    """Return a job's next attempt on the fewest GPUs whose memory suffices: of one node, or all GPUs of several nodes.

    If the memory is not known, it runs on one node with the template's number of GPUs.
    """
    if bounds.gpu_bytes is None or job.memory_bytes is None:
        return Work(job.id, job.lease_token)
    need = Need(job.memory_bytes, job.shared_bytes)
    on_one = ((gpus, 1) for gpus in bounds.counts)
    on_several = ((bounds.gpus, nodes) for nodes in range(2, bounds.nodes + 1))
    ways = (way for way in (*on_one, *on_several) if need.bytes_per_gpu(math.prod(way)) <= bounds.gpu_bytes)
    return Work(job.id, job.lease_token, *next(ways, (bounds.gpus, 1)))


def _start(launcher: Launcher, work: Work) -> str | None:
    """Start a job's next attempt; return the reason for its owner if the cluster refuses it, else None."""
    try:
        launcher.start(work)
        log.info("%s: attempt %d is given to the cluster", work.job_id, work.token)
    except Refused as error:
        log.error("%s: %s", work.job_id, error)
        return REFUSED
    return None


def _stop(launcher: Launcher, started: ClusterWork) -> None:
    try:
        launcher.stop(started)
        log.info("%s: the cluster is told to stop it", started.name)
    except Refused as error:
        log.error("%s: %s", started.name, error)


def _is_queued(job: Job | None) -> bool:
    return job is not None and job.status == JobStatus.queued


def _rows(session: Session, ids: Collection[str]) -> dict[str, Job]:
    ordered = sorted(ids)
    parts = [ordered[start : start + _AT_ONCE] for start in range(0, len(ordered), _AT_ONCE)]
    return {job.id: job for part in parts for job in session.scalars(select(Job).where(Job.id.in_(part)))}


def _tell(engine: Engine, reasons: Mapping[str, str | None], room: Room) -> None:
    """Store why queued jobs do not start, and clear the reason of jobs that can."""
    with transaction(engine) as session:
        # Most reasons stay the same from one look to the next; only rows whose reason changes are written.
        for job_id, reason in sorted(reasons.items()):
            is_new = (Job.status == JobStatus.queued) & Job.launch_reason.is_distinct_from(reason)
            session.execute(update(Job).where(Job.id == job_id, is_new).values(launch_reason=reason))
        is_too_large = (Job.status == JobStatus.queued) & ~needs.has_room(room)
        session.execute(
            update(Job)
            .where(is_too_large, Job.launch_reason.is_distinct_from(TOO_LARGE))
            .values(launch_reason=TOO_LARGE)
            .execution_options(synchronize_session=False)
        )
