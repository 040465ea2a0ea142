"""The base model that a waiting child reads before it has a job; its one job may take it."""

from __future__ import annotations

import gc
import logging
import os
import select
from pathlib import Path

import torch

from app.catalog.model_files import parameters
from app.ops.processes import available_mb
from spard.digests import model_file_name
from spard.models.base import Base, read_base
from spard.models.sharding import shard_
from worker.protocol import ModelRequest, parse_prefetch

_SINGLE = 4  # bytes of a number in float32
_LOOK_S = 1.0  # between two checks of the free memory

log = logging.getLogger(__name__)


class Holder:
    """Holds at most one base model in main memory, and drops it when memory gets short."""

    def __init__(self) -> None:
        self._held: tuple[ModelRequest, Base] | None = None
        self._size = 0

    @property
    def is_empty(self) -> bool:
        """Return True if no base model is held."""
        return self._held is None

    def hold(self, wanted: ModelRequest) -> None:
        """Drop the model that was held before, and read a base model if enough memory is free.

        A failure is only logged: the job that needs the model will fail by itself and report it.
        """
        self.drop()
        if wanted.quantization != "none" and torch.cuda.is_available():
            return  # quantized weights are read onto the GPU, which the current job is using
        size, free = _bytes(wanted), _free_bytes()
        if size is None or not may_read(size, free):
            log.info("no base model is read ahead: it takes %s bytes, and %s are free", size, free)
            return
        try:
            base = read_base(
                wanted.model,
                wanted.revision,
                quantization=wanted.quantization,
                sha256=lambda path: wanted.weights[model_file_name(path)],
            )
        except Exception:
            log.exception("the base model was not read ahead")
            return
        self._held, self._size = (wanted, base), size
        self.look()

    def look(self) -> None:
        """Drop the base model if memory is short."""
        if self._held and not may_keep(self._size, _free_bytes()):
            log.info("the base model that was read ahead is dropped: memory is short")
            self.drop()

    def drop(self) -> None:
        """Drop the base model and free its memory."""
        self._held = None
        gc.collect()

    def take(self, wanted: ModelRequest | None) -> Base | None:
        """Return the held base model, moved to its device, if it is `wanted`, else None; hold nothing afterward."""
        held, self._held = self._held, None
        if held and held[0] == wanted:
            log.info("the base model was read ahead")
            shard_(held[1].model, "none", held[1].device)
            return held[1]
        del held
        gc.collect()
        return None


def wait_for_folder(stdin: int, holder: Holder) -> str:
    """Read lines until one names a folder and return it, or "" at the end of the input; obey prefetch lines before it.

    No byte after the folder's line is read: the answers to the job's judge calls follow on the same descriptor.
    """
    while True:
        if not holder.is_empty and not select.select([stdin], [], [], _LOOK_S)[0]:
            holder.look()
            continue
        line = _line(stdin)
        wanted = parse_prefetch(line)
        if wanted is None:
            return line
        holder.hold(wanted)


def _line(stdin: int) -> str:
    found = bytearray()
    while (byte := os.read(stdin, 1)) not in (b"", b"\n"):
        found += byte
    return found.decode().strip()


def _bytes(wanted: ModelRequest) -> int | None:
    """Return the size of a model's weights in float32, an upper bound, in bytes; None if it is unknown."""
    count = parameters(wanted.model) if Path(wanted.model).is_dir() else None
    return None if count is None else _SINGLE * count


def _free_bytes() -> int:
    """Return the available main memory in bytes; 0 if the system does not report it."""
    return (available_mb() or 0) << 20


# Decides if a base model may be preloaded into the main memory of a process that waits for a job.
#
# Nothing is preloaded onto a GPU, whose memory the plan of a training (`spard.models.memory`) uses whole. In main
# memory, as much as the model's size stays free for the running job, which may load its model again to prove its
# adapter.

_LEAST = 1 << 30  # minimum free bytes beside a small model


def may_read(model_bytes: int, free_bytes: int) -> bool:
    """Return True if a model may be read into main memory with so many free bytes."""
    return may_keep(model_bytes, free_bytes - model_bytes)


def may_keep(model_bytes: int, free_bytes: int) -> bool:
    """Return True if a model that has been read may stay, with so many bytes free beside it."""
    # Room for a second copy: the running job may load its own model once more for the proof.
    return free_bytes >= max(model_bytes, _LEAST)
