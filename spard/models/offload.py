"""Moves a model to main memory while another process needs its GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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


def free_share(device: torch.device) -> float | None:
    """Return the free share of a GPU's memory, 0 to 1; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return float(free / total)
