"""Response schemas of workers and the queue, for the provider."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from app.db.tables import JobStatus
from app.http.schemas import UnixTime


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
