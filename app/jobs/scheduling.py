"""Decide which queued job is next: projects take turns by their GPU time, and priority orders a project's own jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest
from math import exp2, log
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, bindparam, case, func, or_, select
from sqlalchemy.orm import Session, aliased

from app import db
from app.db import now
from app.db.tables import Job, JobStatus, Project, Quota
from app.jobs import needs
from app.jobs.needs import Room
from app.jobs.rows import AnyJob

ANY = Room()

Ranked = tuple[str, str, int]  # job id, project id, rank among the project's queued jobs


class Place(NamedTuple):
    """A queued job's position, counted from 1, and why no worker takes it, if none can."""

    position: int | None = None
    reason: str | None = None


# Built once: they run whenever a waiting job or the queue is shown, or a worker looks for a job.
_LENGTHS = db.PreparedStatement(
    select(Job.project_id, func.count()).where(Job.status == JobStatus.queued).group_by(Job.project_id), tuple
)
_PLACES = select(
    Job.id,
    Job.project_id.label("project_id"),
    func.rank().over(partition_by=Job.project_id, order_by=(Job.priority, Job.created_at)).label("place"),
).where(Job.project_id.in_(bindparam("projects", expanding=True)), Job.status == JobStatus.queued)
_PLACE = _PLACES.subquery()
_RANKS = select(_PLACE.c.id, _PLACE.c.project_id, _PLACE.c.place).where(
    _PLACE.c.id.in_(bindparam("jobs", expanding=True))
)
_EARLIER = aliased(Job)
_SAME = (_EARLIER.priority == bindparam("priority_is")) & (_EARLIER.created_at < bindparam("created"))
_AHEAD = select(func.count()).where(
    _EARLIER.project_id == bindparam("project"),
    _EARLIER.status == JobStatus.queued,
    or_(_EARLIER.priority < bindparam("priority_is"), _SAME),
)
_LENGTHS_AND_AHEAD = db.PreparedStatement(
    select(Job.project_id, func.count(), _AHEAD.scalar_subquery())
    .where(Job.status == JobStatus.queued)
    .group_by(Job.project_id),
    tuple,
)

_OF_PROJECT = Job.project_id == Project.id
_IS_READY = select(Job.id).where(_OF_PROJECT, Job.status == JobStatus.queued, Job.run_after <= now()).exists()
_STANDINGS = select(
    Project.id,
    Project.used_seconds,
    now() - Project.used_at,
    Quota.weight,
    select(func.max(Job.started_at)).where(_OF_PROJECT).scalar_subquery(),
    _IS_READY,
).outerjoin(Quota, Quota.project_id == Project.id)
_READY = _STANDINGS.where(_IS_READY)
_AMONG = _STANDINGS.where(Project.id.in_(bindparam("projects", expanding=True)))
# The stored seconds end at the last heartbeat; the time since then counts unless the job waits for something.
_SINCE = case((Job.waiting_for.is_(None), now() - func.coalesce(Job.seen_at, now())), else_=0.0)
_RUNNING = select(Job.project_id, Job.gpu_seconds - Job.gpu_seconds_before + _SINCE).where(
    Job.status == JobStatus.running
)


def projects(session: Session) -> list[str]:
    """Return the projects that have a job to start, in the order of their turns."""
    return [one.project_id for one in standings(session)]


def standings(session: Session, among: Collection[str] | None = None) -> list[ProjectShare]:
    """Return the standings of the projects that have a job to start, in the order of their turns.

    With `among`, a collection of project ids, the standings of those projects instead, even without a job to start.
    """
    return in_turn(_standings(session, among, _running(session)))


def charge(session: Session, project_id: str, seconds: float) -> None:
    """Add the GPU seconds of an ended attempt to its project's total, which fades with time (see `fade`).

    The project's row stays locked until the transaction ends.
    """
    # FOR NO KEY UPDATE: rows that reference the project can still be inserted meanwhile.
    project = session.get_one(Project, project_id, with_for_update={"key_share": True}, populate_existing=True)
    at = session.scalar(select(now())) or 0.0
    project.used_seconds = fade(project.used_seconds, at - project.used_at) + running_seconds(seconds)
    project.used_at = at


def select_first(
    which: ColumnElement[bool], owner: str = "", lacks: Collection[str] = (), room: Room = ANY
) -> Select[str]:
    """Select the id of the first job of `which` that may start and that no other worker is claiming.

    Left to other workers are jobs that avoid the worker `owner`, jobs whose base model's source is in `lacks`, and jobs
    that need more memory than its `room`.
    """
    is_ready = (Job.status == JobStatus.queued) & (Job.run_after <= now())
    is_for_owner = or_(Job.excluded_worker_id.is_(None), Job.excluded_worker_id != owner, Job.excluded_until <= now())
    query = select(Job.id).where(which, is_ready, is_for_owner, needs.has_room(room))
    if lacks:
        query = query.where(Job.spec[("model", "source")].as_string().not_in(lacks))
    return query.order_by(Job.priority, Job.created_at, Job.id).limit(1).with_for_update(skip_locked=True)


def turns(session: Session) -> Iterator[ColumnElement[bool]]:
    """Yield a condition that matches a project's jobs, for each project with a job to start, in turn order."""
    return (Job.project_id == project_id for project_id in projects(session))


def next_jobs(session: Session, most: int, room: Room) -> list[Job]:
    """Return the jobs that start next if projects take turns: at most `most`, only jobs that fit `room`.

    For launchers, which start a process for each of them; no job is locked or claimed.
    """
    is_ready = (Job.status == JobStatus.queued) & (Job.run_after <= now()) & needs.has_room(room)
    order = Job.priority, Job.created_at, Job.id
    of_projects = [
        session.scalars(select(Job).where(Job.project_id == one, is_ready).order_by(*order).limit(most)).all()
        for one in projects(session)
    ]
    # The first job of each project, then the second of each, and so on.
    return [job for turn in zip_longest(*of_projects) for job in turn if job is not None][:most]


def of_attempt(job_id: str, token: int | None = None) -> ColumnElement[bool]:
    """Match a job; with `token`, only while that is its lease's token, so that an older attempt matches nothing."""
    return Job.id == job_id if token is None else (Job.id == job_id) & (Job.lease_token == token)


def places(reader: db.Reader, jobs: Collection[AnyJob]) -> dict[str, Place]:
    """Return the queue places of those `jobs` that are queued, by job id; runs at most three statements."""
    found = positions(reader, jobs)
    reasons = needs.too_large(reader, jobs) | {job.id: job.launch_reason for job in jobs if job.launch_reason}
    return {job_id: Place(position, reasons.get(job_id)) for job_id, position in found.items()}


def positions(reader: db.Reader, jobs: Collection[AnyJob]) -> dict[str, int]:
    """Return the queue positions of those `jobs` that are queued, counted from 1, by job id.

    The position assumes that all projects take turns. However many jobs are passed, two statements run. For a single
    job, the jobs ahead of it are counted instead of ranked, in one statement; in a long queue that is far cheaper.
    """
    queued_jobs = [job for job in jobs if job.status == JobStatus.queued]
    if not queued_jobs:
        return {}
    lengths, ranks = _place(reader, queued_jobs[0]) if len(queued_jobs) == 1 else _places(reader, queued_jobs)
    found = {}
    for job_id, project_id, rank in ranks:
        ahead = rank - 1
        # If projects take turns, each other project starts at most one job per job that is ahead in this project.
        found[job_id] = rank + sum(min(count, ahead) for other, count in lengths.items() if other != project_id)
    return found


def _places(reader: db.Reader, jobs: Collection[AnyJob]) -> tuple[dict[str, int], list[Ranked]]:
    """Return the queue length of each project, and each job's id, project and rank within its project."""
    asked = {"projects": list({job.project_id for job in jobs}), "jobs": [job.id for job in jobs]}
    ranks = [(found.id, found.project_id, found.place) for found in db.rows(reader, _RANKS, asked)]
    return dict(_LENGTHS.all(reader)), ranks


def _place(reader: db.Reader, job: AnyJob) -> tuple[dict[str, int], list[Ranked]]:
    """Return the same as `_places` for one queued job, in one statement."""
    found = _LENGTHS_AND_AHEAD.all(reader, project=job.project_id, priority_is=job.priority, created=job.created_at)
    # Every row carries the same count of earlier jobs, as a scalar subquery.
    ahead = found[0][2] if found else 0
    return {project_id: count for project_id, count, _ in found}, [(job.id, job.project_id, ahead + 1)]


def _standings(
    session: Session, among: Collection[str] | None, running: Mapping[str, Sequence[float]]
) -> list[ProjectShare]:
    query, values = (_READY, {}) if among is None else (_AMONG, {"projects": list(among)})
    found = []
    for project_id, seconds, since, weight, served, ready in db.rows(session, query, values):
        runs = running.get(project_id, ())
        used = fade(seconds, since) + sum(map(running_seconds, runs))
        found.append(ProjectShare(project_id, len(runs), used, weight or 1.0, served, is_ready=bool(ready)))
    return found


def _running(session: Session) -> dict[str, list[float]]:
    """Return, by project, the seconds that each running job has been worked on in its current attempt."""
    found: dict[str, list[float]] = {}
    for project_id, run_s in db.rows(session, _RUNNING):
        found.setdefault(project_id, []).append(run_s)
    return found


# Order projects by their recent GPU time.
#
# Next is the project with the fewest running jobs, and among several the project with the least GPU time; so a
# project with one job waits for at most one job of another. GPU time fades: after six hours it counts half, as in the
# admission fair sharing of Kueue. It matters if there are more projects than GPUs, and each runs one job or none:
# without it, projects whose jobs take hours occupy nearly all GPUs although projects take turns. Both counts are
# divided by the project's weight.

HALF_LIFE_S = 6 * 3600.0
_LEAST_S = 1.0  # a running job counts at least this, so that a project just served is not next again


@dataclass(frozen=True, slots=True)
class ProjectShare:
    """A project's position relative to others.

    running    the number of its running jobs
    used       its GPU seconds, faded, including those of running jobs
    weight     its share relative to others; twice the weight gets twice the time
    served_at  when one of its jobs was last started
    is_ready   it has a job to start
    """

    project_id: str
    running: int = 0
    used: float = 0.0
    weight: float = 1.0
    served_at: datetime | None = None
    is_ready: bool = True


def in_turn(standings: Iterable[ProjectShare]) -> list[ProjectShare]:
    """Return the projects in the order in which they are served.

    Running jobs are divided by the weight, rounded down: a project of weight 3 with two running jobs counts as running
    none.
    """

    def turn(one: ProjectShare) -> tuple[float, float, float, str]:
        served = one.served_at.timestamp() if one.served_at else 0.0
        return one.running // one.weight, one.used / one.weight, served, one.project_id

    return sorted(standings, key=turn)


def fade(seconds: float, since: float) -> float:
    """Return the GPU seconds that remain of `seconds` counted `since` seconds ago: half after `HALF_LIFE_S`."""
    return seconds * exp2(-max(since, 0.0) / HALF_LIFE_S)


def running_seconds(seconds: float) -> float:
    """Return the GPU seconds, faded as by `fade`, of a job that has run for the last `seconds`.

    This is the integral of `fade` over the run, and at least one second.
    """
    # The integral of 2^(-t / half-life) from 0 to `seconds`; `steady` is its limit for a job that runs forever.
    steady = HALF_LIFE_S / log(2)
    return max(_LEAST_S, steady * (1 - exp2(-max(seconds, 0.0) / HALF_LIFE_S)))


def recent_shares(standings: Sequence[ProjectShare]) -> dict[str, float]:
    """Return each project's share, from 0 to 1, of the recent GPU time of all (see `fade`)."""
    whole = sum(one.used for one in standings)
    return {one.project_id: one.used / whole if whole else 0.0 for one in standings}
