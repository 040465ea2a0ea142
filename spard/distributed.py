"""One run on several processes, each with its own device: batches are shared, and all sums over ranks are made here.

Every process holds all parameters, processes its share of the rows and takes the same steps, because losses, token
counts and gradients are summed over all processes first. A process without a group is a run of one: nothing is sent,
and no number changes. Only rank 0 writes files.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")

_parts: dist.ProcessGroup | None = None
_is_alone: ContextVar[bool] = ContextVar("_is_alone", default=False)

# Ranks wait while rank 0 asks a judge, which may take hours; if one rank fails, torchrun ends all of them.
_PATIENCE = timedelta(days=1)
_BUCKET = 2**24  # maximum elements per message


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group that torchrun has prepared, with one GPU per process; do nothing without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    yield  # not in `finally`: after an error this call waits for ranks that are gone
    dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Act as a run of one process inside the block, in this thread, e.g. for a model that only this process has."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def leave(status: int) -> NoReturn:
    """Exit with a status; in a group, flush the output and exit without Python's shutdown.

    Threads of gloo may still hold tensors. A thread that releases them during Python's shutdown requests a lock that is
    no longer given, and C++ aborts the process (https://github.com/pytorch/pytorch/pull/179291).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def rank() -> int:
    """Return this process's rank, 0 to `world_size() - 1`."""
    return dist.get_rank() if _is_group() else 0


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if _is_group() else 1


def share(rows: Sequence[Item]) -> Sequence[Item]:
    """Return this rank's rows of a batch; possibly none."""
    return shares(rows)[rank()]


def shares(rows: Sequence[Item]) -> list[Sequence[Item]]:
    """Return each rank's rows of a batch; some may have none."""
    return [rows[rank :: world_size()] for rank in range(world_size())]


@torch.no_grad()
def sum_(parts: Sequence[Tensor]) -> None:
    """Replace tensors by their sums over all ranks, in place, many tensors per message."""
    if _is_group():
        for bucket in _buckets(parts):
            flat = torch.cat([part.reshape(-1) for part in bucket])
            dist.all_reduce(flat)
            for part, found in zip(bucket, torch.split(flat, [part.numel() for part in bucket]), strict=True):
                part.copy_(found.view_as(part))


def sum_counts(counts: Sequence[int], device: torch.device) -> list[int]:
    """Return whole numbers summed over all ranks; below 2**63 each."""
    if not _is_group():
        return list(counts)
    found = torch.tensor(list(counts), dtype=torch.int64, device=device)
    dist.all_reduce(found)
    return [int(each) for each in found.tolist()]


@contextmanager
def in_parts(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Declare that the training vectors are sharded over the ranks of `group` inside the block (None: not sharded)."""
    global _parts
    _parts = group
    try:
        yield
    finally:
        _parts = None


def are_parts() -> bool:
    """Return True if the training vectors are sharded."""
    return _parts is not None


def over_parts(number: Tensor) -> Tensor:
    """Return the sum of a number over all shards of a vector; unchanged if vectors are not sharded."""
    if _parts is not None:
        dist.all_reduce(number, group=_parts)
    return number


def broadcast_scalars(numbers: Mapping[str, float], device: torch.device) -> dict[str, float]:
    """Broadcast rank 0's numbers by name, as float64, to all ranks."""
    if not _is_group():
        return dict(numbers)
    values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.broadcast(values, src=0)
    return dict(zip(numbers, values.tolist(), strict=True))


def broadcast_object(word: Item) -> Item:
    """Broadcast rank 0's object to all ranks; the arguments of the other ranks are ignored."""
    words = [word]
    if _is_group():
        dist.broadcast_object_list(words, src=0)
    return words[0]


def broadcast_tensor(tensor: Tensor | None) -> Tensor:
    """Broadcast rank 0's tensor to all ranks, on the CPU."""
    shape, dtype = broadcast_object(None if tensor is None else (tensor.shape, tensor.dtype)) or ((), torch.float32)
    found = torch.empty(shape, dtype=dtype) if tensor is None else tensor.cpu().contiguous()
    if _is_group():
        dist.broadcast(found.view(-1).view(torch.uint8), src=0)
    return found


def gather_objects(own_part: Item) -> list[Item]:
    """Return one object per rank, in rank order, on all ranks."""
    parts = [own_part] * world_size()
    if _is_group():
        dist.all_gather_object(parts, own_part)
    return parts


def wait_for_all() -> None:
    """Wait until every rank has reached this call."""
    gather_objects(None)


def first_before_others(make: Callable[[], Item]) -> Item:
    """Call `make` on rank 0 first, then on the other ranks, and return each rank's own result.

    Files that rank 0 creates are there when the other ranks call `make`.
    """
    if rank() == 0:
        found = make()
        wait_for_all()
        return found
    wait_for_all()
    return make()


def is_anywhere(fact: bool) -> bool:
    """Return True if `fact` is True on any rank."""
    found = torch.tensor(int(fact))
    if _is_group():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def rank_batches(batches: Sequence[Item]) -> list[Item | None]:
    """Return this rank's batches (every `world_size`-th), padded with None to the same number on all ranks."""
    rounds = math.ceil(len(batches) / world_size())
    mine: list[Item | None] = list(batches[rank() :: world_size()])
    return mine + [None] * (rounds - len(mine))


def seeds() -> list[int]:
    """Return extra seed words that make this rank's random numbers differ from the others'; [] for rank 0."""
    return [rank()] if rank() else []


def _buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype and device together, at most `_BUCKET` elements or a single tensor."""
    for kind in dict.fromkeys((part.dtype, part.device) for part in parts):
        bucket, elements = list[Tensor](), 0
        for part in parts:
            if (part.dtype, part.device) == kind:
                if bucket and elements + part.numel() > _BUCKET:
                    yield bucket
                    bucket, elements = [], 0
                bucket.append(part)
                elements += part.numel()
        yield bucket


def _is_group() -> bool:
    return not _is_alone.get() and dist.is_available() and dist.is_initialized()
