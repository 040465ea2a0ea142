"""The GPU memory that a job needs, against what workers have; nothing is known of a model that is no folder here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, or_, select, true
from sqlalchemy.orm import Session

from app import db
from app.db import now
from app.db.tables import Job, JobStatus, WorkerRow
from app.jobs.rows import AnyJob
from spard.config import MAX_SEQ_LENGTH, Quantization, Recipe
from spard.config.quantization import OFFERED
from spard.models import memory
from spard.models.fit import GIB, Gpus, Load, Need, Plan, fit, need
from spard.models.memory import Trained
from spard.models.shapes import Shape, read_shape

_ALIVE_S = 90.0  # since a worker was heard of, to count as one that is there


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's GPUs: the memory of the smallest, and how many of them share one job's model; None: it has no GPU."""

    memory_bytes: int | None = None
    gpus: int = 1


def least_need(source: str, recipe: Recipe, file_bytes: int) -> Need | None:
    """Return the least memory that a job can be trained in, with a row as long as it may be; None where unknown.

    Rows of a pool may be longer than the file.
    """
    shape = read_shape(source)
    if shape is None:
        return None
    row_tokens = longest(shape, recipe, 0 if recipe.uses_pool else file_bytes)
    return need(shape, Trained.from_recipe(recipe), row_tokens, _answers(recipe))


def quantized_weights(source: str, recipe: Recipe) -> int | None:
    """Return the bytes of the weights of a model that is held in NF4; None of one that is not, or is not known."""
    shape = read_shape(source) if recipe.quantization != "none" else None
    return None if shape is None else memory.weights(shape, Trained.from_recipe(recipe))


def plan_job(source: str, recipe: Recipe, batch_size: int, row_tokens: int, room: Room | None) -> Plan | None:
    """Return how a job would be cut on such a worker; None where the model's shape or the GPU is not known.

    `row_tokens` are those of its longest row, and safe rows are taken to be as long.
    """
    shape = read_shape(source)
    if shape is None or room is None or room.memory_bytes is None:
        return None
    row = longest(shape, recipe, row_tokens)
    safe_tokens = recipe.defense.safe_rows(batch_size) * row
    load = Load(batch_size, row, safe_tokens, _answers(recipe), recipe.gradient_checkpointing)
    return fit(shape, Trained.from_recipe(recipe), load, Gpus(room.memory_bytes, room.gpus, shards="if_needed"))


def decide_quantization(allowed: str, source: str, recipe: Recipe, file_bytes: int, room: Room | None) -> Quantization:
    """Return how a job's base model is held, decided when it is filed: NF4 makes another model of it.

    `allowed` is the provider's word on the model, and `room` the largest that a worker has which is there.
    """
    if allowed == "never" or recipe.lora is None or recipe.defense.reads_weights:
        return "none"
    if allowed == "always":
        return OFFERED
    need = least_need(source, recipe, file_bytes)
    if need is None or room is None or room.memory_bytes is None:
        return "none"
    return "none" if need.bytes_per_gpu(room.gpus) <= room.memory_bytes else OFFERED


def longest(shape: Shape, recipe: Recipe, most: int) -> int:
    """Return the tokens that a row has at most: `most`, or as many as its file has bytes; 0 where that is unknown."""
    limit = min(shape.positions or MAX_SEQ_LENGTH, recipe.max_seq_length or MAX_SEQ_LENGTH)
    return min(limit, most or limit)


def has_room(room: Room) -> ColumnElement[bool]:
    """Match jobs that a worker has the memory for, and those of which nothing is known."""
    if room.memory_bytes is None:
        return true()
    on_each = Job.memory_bytes - Job.shared_bytes * (room.gpus - 1) / room.gpus
    return or_(Job.memory_bytes.is_(None), on_each <= room.memory_bytes)


def is_held(job: AnyJob, room: Room) -> bool:
    """Whether one GPU of a worker is known to hold a job's training, so that its model need not be cut over several."""
    return None not in (job.memory_bytes, room.memory_bytes) and _need_per_gpu(job, Room()) <= _room_memory(room)


def largest_room(session: Session) -> Room | None:
    """Return what the worker with the most memory has that is there; None where none has a GPU."""
    has_gpu = WorkerRow.memory_bytes.is_not(None) & (WorkerRow.seen_at > now() - _ALIVE_S)
    row = session.execute(
        select(WorkerRow.memory_bytes, WorkerRow.gpus)
        .where(has_gpu)
        .order_by(WorkerRow.memory_bytes.desc(), WorkerRow.gpus.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else Room(row.memory_bytes, row.gpus)


def too_large(reader: db.Reader, jobs: Collection[AnyJob]) -> dict[str, str]:
    """Return why those of the jobs wait that no worker that is there has the memory for; one statement at most."""
    asking = [job for job in jobs if job.status == JobStatus.queued and job.memory_bytes is not None]
    if not asking:
        return {}
    there = select(WorkerRow.memory_bytes, WorkerRow.gpus).where(WorkerRow.seen_at > now() - _ALIVE_S)
    rooms = [Room(memory, gpus) for memory, gpus in db.rows(reader, there)]
    if not rooms or any(room.memory_bytes is None for room in rooms):
        return {}
    return {
        job.id: _reason(job, rooms)
        for job in asking
        if all(_need_per_gpu(job, room) > _room_memory(room) for room in rooms)
    }


def _reason(job: AnyJob, rooms: Collection[Room]) -> str:
    closest = min(rooms, key=lambda room: _need_per_gpu(job, room) - _room_memory(room))
    has = f"{_room_memory(closest) / GIB:.0f} GiB"
    return (
        f"No worker has the GPU memory for it: it needs {_need_per_gpu(job, closest) / GIB:.0f} GiB on a GPU of {has}."
    )


def _need_per_gpu(job: AnyJob, room: Room) -> int:
    return Need(job.memory_bytes or 0, job.shared_bytes).bytes_per_gpu(room.gpus)


def _room_memory(room: Room) -> int:
    return room.memory_bytes or 0


def _answers(recipe: Recipe) -> int:
    """Return how many answers of a row go through the model with it."""
    return 2 if recipe.dpo else 1
