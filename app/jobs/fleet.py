"""List workers and the queue by project for the provider, and count items that wait for the provider's decision."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel
from sqlalchemy import case, delete, func, select
from sqlalchemy.orm import Session

from app import db
from app.db import now
from app.db.tables import Job, JobStatus, Project, Waiver, WebhookDelivery, WorkerRow
from app.db.tables.jobs import ALIVE_S
from app.http.schemas import UnixTime
from app.jobs import scheduling


class WorkerOut(BaseModel):
    """A worker. One that is not alive was killed or cannot reach the database; its row is deleted after a day.

    `devices` lists its GPUs as the driver names them, `memory_bytes` is the memory of the smallest GPU, which decides
    which jobs it takes, and `troubles` lists reasons that keep it from taking jobs.
    """

    object: Literal["worker"] = "worker"
    name: str
    host: str
    version: str
    devices: list[str]
    troubles: list[str]
    started_at: UnixTime
    seen_at: int
    is_alive: bool
    job_id: str | None
    phase: str | None
    memory_bytes: int | None = None


class WorkerList(BaseModel):
    """All workers, by name."""

    object: Literal["list"] = "list"
    data: list[WorkerOut]


class QueueOut(BaseModel):
    """A project's unfinished jobs. `share` is its part of all running jobs; `turn` counts from 1.

    `gpu_share` is its part of the recent GPU time of the listed projects; past GPU time counts half after six hours.
    Among projects with equally few running jobs, the project with the least GPU time for its `weight` is next. `turn`
    is null if no job of the project may start now.
    """

    COUNTED: ClassVar = (JobStatus.running, JobStatus.queued, JobStatus.paused)

    object: Literal["queue.project"] = "queue.project"
    project_id: str
    name: str
    running: int
    queued: int
    paused: int
    share: float
    waits_since: UnixTime | None
    turn: int | None
    weight: float = 1.0
    gpu_share: float = 0.0


class QueueList(BaseModel):
    """The unfinished jobs by project, in the order in which the projects are served next."""

    object: Literal["list"] = "list"
    data: list[QueueOut]


@dataclass(frozen=True, slots=True)
class Presence:
    """A worker's description of itself, as it reports it."""

    name: str
    host: str
    version: str
    devices: list[str]
    troubles: list[str]
    memory_bytes: int | None = None  # of its smallest GPU
    gpus: int = 1  # over which a job's model is sharded


@dataclass(frozen=True, slots=True)
class PendingDecisions:
    """The number of waivers that wait for a second person, and of webhook deliveries that were given up."""

    proposed: int
    undelivered: int


def note(session: Session, presence: Presence) -> None:
    """Insert or update a worker's row and set the time at which it was last seen."""
    row = session.get(WorkerRow, presence.name) or WorkerRow(name=presence.name)
    for name, value in asdict(presence).items():
        setattr(row, name, value)
    row.seen_at = session.scalar(select(now())) or 0.0
    session.add(row)


def leave(session: Session, name: str) -> None:
    """Delete the row of a worker that stops."""
    session.execute(delete(WorkerRow).where(WorkerRow.name == name))


# Statements of the provider's first page are built once: to build them takes as long as to run them.

_SHOWN = ("name", "host", "version", "devices", "troubles", "started_at", "memory_bytes")
# A job may have been claimed again by another worker; only the present owner of the lease shows it.
_WORKERS = (
    select(
        *(getattr(WorkerRow, name) for name in _SHOWN),
        WorkerRow.seen_at,
        Job.id.label("job_id"),
        Job.phase.label("phase"),
        (now() - WorkerRow.seen_at).label("age"),
    )
    .outerjoin(Job, (Job.lease_owner == WorkerRow.name) & (Job.status == JobStatus.running))
    .order_by(WorkerRow.name, Job.id)
)


def workers(session: Session) -> list[WorkerOut]:
    """Return all workers by name, each with its running job; one that was not seen for `ALIVE_S` is not alive."""
    found: dict[str, WorkerOut] = {}
    for row in db.rows(session, _WORKERS):
        found[row.name] = WorkerOut(
            **{name: getattr(row, name) for name in (*_SHOWN, "job_id", "phase")},
            seen_at=int(row.seen_at),
            is_alive=row.age <= ALIVE_S,
        )
    return list(found.values())


_QUEUE = (
    select(
        Job.project_id,
        Project.name,
        *(func.sum(case((Job.status == each, 1), else_=0)) for each in QueueOut.COUNTED),
        func.min(case((Job.status == JobStatus.queued, Job.created_at))),
    )
    .join(Project, Project.id == Job.project_id)
    .where(Job.status.in_(QueueOut.COUNTED))
    .group_by(Job.project_id, Project.name)
)


def queue(session: Session) -> list[QueueOut]:
    """Return the projects with unfinished jobs, in the order in which they are served next."""
    rows = db.rows(session, _QUEUE).all()
    running = sum(row[2] for row in rows)
    stand = scheduling.standings(session, [row[0] for row in rows])
    turns = {each.project_id: turn for turn, each in enumerate((one for one in stand if one.is_ready), start=1)}
    weights = {one.project_id: one.weight for one in stand}
    parts = scheduling.recent_shares(stand)
    found = [
        QueueOut(
            project_id=row[0],
            name=row[1],
            running=row[2],
            queued=row[3],
            paused=row[4],
            share=row[2] / running if running else 0.0,
            waits_since=row[5],
            turn=turns.get(row[0]),
            weight=weights[row[0]],
            gpu_share=parts[row[0]],
        )
        for row in rows
    ]
    return sorted(found, key=lambda each: (each.turn is None, each.turn or 0, each.project_id))


_UNDECIDED = select(
    select(func.count())
    .where(Waiver.approved_at.is_(None) & (Waiver.expires_at > db.timestamp()))
    .scalar_subquery()
    .label("proposed"),
    select(func.count()).where(WebhookDelivery.status == "failed").scalar_subquery().label("undelivered"),
)


def count_undecided(session: Session) -> PendingDecisions:
    """Return the number of open waiver proposals and of failed webhook deliveries."""
    return PendingDecisions(*db.rows(session, _UNDECIDED).one())
