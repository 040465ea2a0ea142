"""How many threads a model is worth on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALL = 20_000_000  # parameters


def is_small(model: Any) -> bool:
    """Tell whether a model is on a CPU and so small that sharing its work costs more than it gives."""
    return bool(model.device.type == "cpu" and model.num_parameters() < SMALL)


@contextmanager
def threads_of_jobs(model: Any) -> Iterator[None]:
    """Compute with as many threads as a job on the model would by default, inside the block."""
    before = torch.get_num_threads()
    if is_small(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
