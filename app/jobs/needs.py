"""Compare the GPU memory that a job needs with the memory of the workers.

The shape of a model is read from its folder; functions return None for a model that is not a folder on this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, or_, select, true
from sqlalchemy.orm import Session

from app import db
from app.db import now
from app.db.tables import Job, JobStatus, WorkerRow
from app.db.tables.jobs import ALIVE_S
from app.jobs.rows import AnyJob
from spard.config import MAX_SEQ_LENGTH, Quantization, Recipe
from spard.config.quantization import OFFERED
from spard.models import memory
from spard.models.memory import GIB, Gpus, Load, Need, Plan, TrainedPart, compute_need, fit
from spard.models.shapes import Shape, read_shape


@dataclass(frozen=True, slots=True)
class Room:
    """A worker's GPUs: the memory in bytes of the smallest (None without a GPU) and how many share one job's model."""

    memory_bytes: int | None = None
    gpus: int = 1


def least_need(source: str, recipe: Recipe, file_bytes: int) -> Need | None:
    """Return the least memory that can train a job with rows of the greatest length; None if unknown.

    `file_bytes` bounds the length of a row, because a token has at least one byte. It does not bound rows of a pool.
    """
    shape = read_shape(source)
    if shape is None:
        return None
    row_tokens = longest(shape, recipe, 0 if recipe.uses_pool else file_bytes)
    # One row at a time is the least that a micro-batch can be.
    return compute_need(shape, TrainedPart.from_recipe(recipe), row_tokens, _answers(recipe))


def quantized_weights(source: str, recipe: Recipe) -> int | None:
    """Return the bytes of a model's weights in NF4; None if it is not quantized or its shape is unknown."""
    shape = read_shape(source) if recipe.quantization != "none" else None
    return None if shape is None else memory.weight_bytes(shape, TrainedPart.from_recipe(recipe))


def plan_job(source: str, recipe: Recipe, batch_size: int, row_tokens: int, rooms: Sequence[Room]) -> Plan | None:
    """Return how a job is divided to fit the first of these workers whose GPUs hold it, else the first worker.

    `row_tokens` is the length of its longest row in tokens; safe rows are assumed to be as long. None if the model's
    shape is unknown or there is no room.
    """
    shape = read_shape(source)
    if shape is None:
        return None
    row = longest(shape, recipe, row_tokens)
    safe_tokens = recipe.defense.safe_rows(batch_size) * row
    load = Load(batch_size, row, safe_tokens, _answers(recipe), recipe.gradient_checkpointing)
    trained = TrainedPart.from_recipe(recipe)
    plans = [fit(shape, trained, load, Gpus(_room_memory(room), room.gpus, shards="if_needed")) for room in rooms]
    return next((plan for plan in plans if plan.fits), plans[0] if plans else None)


def decide_quantization(
    allowed: str, source: str, recipe: Recipe, file_bytes: int, rooms: Sequence[Room]
) -> Quantization:
    """Return the quantization of a new job's base model; it is final, because NF4 makes another model of it.

    `allowed` is the provider's setting of the model (`never`, `if_needed` or `always`), and `rooms` are those of live
    workers with GPUs. With `if_needed`, NF4 is chosen only if no room holds the job otherwise.
    """
    if allowed == "never" or recipe.lora is None or recipe.defense.reads_weights:
        return "none"
    if allowed == "always":
        return OFFERED
    need = least_need(source, recipe, file_bytes)
    if need is None or not rooms:
        return "none"
    fits = any(need.bytes_per_gpu(room.gpus) <= _room_memory(room) for room in rooms)
    return "none" if fits else OFFERED


def longest(shape: Shape, recipe: Recipe, most: int) -> int:
    """Return the greatest number of tokens of a row: `most`, capped by the model's and the recipe's limits.

    `most` is a count of tokens or a file's number of bytes; 0 means unknown, and the limit is returned.
    """
    limit = min(shape.positions or MAX_SEQ_LENGTH, recipe.max_seq_length or MAX_SEQ_LENGTH)
    return min(limit, most or limit)


def has_room(room: Room) -> ColumnElement[bool]:
    """Match the jobs that fit the worker's memory, and jobs whose need is unknown."""
    if room.memory_bytes is None:
        return true()
    # Sharding divides only `shared_bytes` (weights and what goes with them); everything else is on each GPU.
    on_each = Job.memory_bytes - Job.shared_bytes * (room.gpus - 1) / room.gpus
    return or_(Job.memory_bytes.is_(None), on_each <= room.memory_bytes)


def is_held(job: AnyJob, room: Room) -> bool:
    """Return True if one GPU of the worker is known to fit the job, so that its model need not be sharded."""
    return None not in (job.memory_bytes, room.memory_bytes) and _need_per_gpu(job, Room()) <= _room_memory(room)


def gpu_rooms(session: Session) -> list[Room]:
    """Return the distinct sizes of live workers' GPUs, those with the most memory for each GPU first."""
    has_gpu = WorkerRow.memory_bytes.is_not(None) & (WorkerRow.seen_at > now() - ALIVE_S)
    rows = session.execute(
        select(WorkerRow.memory_bytes, WorkerRow.gpus)
        .where(has_gpu)
        .distinct()
        .order_by(WorkerRow.memory_bytes.desc(), WorkerRow.gpus.desc())
    )
    return [Room(memory_bytes, gpus) for memory_bytes, gpus in rows]


def too_large(reader: db.Reader, jobs: Collection[AnyJob]) -> dict[str, str]:
    """Return, by job id, why a queued job waits if no live worker has the memory for it.

    Runs one statement at most. Jobs that fit a worker, or whose need is unknown, are not in the result.
    """
    asking = [job for job in jobs if job.status == JobStatus.queued and job.memory_bytes is not None]
    if not asking:
        return {}
    there = select(WorkerRow.memory_bytes, WorkerRow.gpus).where(WorkerRow.seen_at > now() - ALIVE_S)
    rooms = [Room(memory, gpus) for memory, gpus in db.rows(reader, there)]
    # A worker without a GPU takes jobs of any size, so no job waits for memory.
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
    """Return the number of answers that go through the model with each row: 2 for DPO's pairs."""
    return 2 if recipe.dpo else 1
