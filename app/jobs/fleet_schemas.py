"""Workers and the queue as the provider sees them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from app.db.tables import JobStatus
from app.http.schemas import UnixTime


class WorkerOut(BaseModel):
    """A worker. One that is not alive was killed, or cannot reach the database; its row goes after a day.

    `devices` are its GPUs as the driver names them, `memory_bytes` the memory of the smallest, by which it takes jobs;
    `troubles` what keeps it from jobs.
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
    """A project's jobs that have not ended. `share` is its part of all running jobs; `turn` counts from 1.

    `gpu_share` is its part of the GPU time of late of all projects here; half of it fades in six hours. Of those with
    as few running jobs, the one is next whose GPU time is the least for its `weight`. `turn` is null where no job of
    the project may start at the moment.
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
    """Unfinished jobs by project, in the order in which the projects are served next."""

    object: Literal["list"] = "list"
    data: list[QueueOut]
