"""Where a model computes: the CPU threads of a small one, and GPU memory that is freed for another process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALL = 20_000_000  # parameters
_C_LIBRARY = ctypes.CDLL(None)


def is_small(model: Any) -> bool:
    """Return True if the model is on a CPU and too small to gain from several threads."""
    return bool(model.device.type == "cpu" and model.num_parameters() < SMALL)


@contextmanager
def threads_of_jobs(model: Any) -> Iterator[None]:
    """Use, inside the block, as many threads as a job with this model does by default."""
    before = torch.get_num_threads()
    if is_small(model):
        # Splitting such small products over threads costs more than it saves.
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def offload(model: Any) -> Iterator[None]:
    """Keep the model's weights in main memory inside the block, and return its GPU memory to the driver.

    Does nothing for a model on a CPU. The weights must not be sharded.
    """
    device = model.device
    if device.type == "cuda":
        model.to("cpu")
        gc.collect()
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        model.to(device)


def return_freed_memory() -> None:
    """Return freed memory to the system where the C library can (glibc); it keeps hundreds of megabytes otherwise.

    Tensors of other sizes than the freed ones hardly fit into it, so each stage of a run would need memory of its own.
    """
    if trim := getattr(_C_LIBRARY, "malloc_trim", None):
        trim(0)


def free_share(device: torch.device) -> float | None:
    """Return the free share of a GPU's memory, 0 to 1; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return float(free / total)
