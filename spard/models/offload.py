"""Models that make room: their weights in main memory while another process needs the GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def offload(model: Any) -> Iterator[None]:
    """Keep the weights of a model in main memory inside the block, and give free memory of its GPU back to the driver.

    A model on a CPU stays as it is. Its weights may not be cut over ranks.
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
    """Return the share of a GPU's memory that is free; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return float(free / total)
