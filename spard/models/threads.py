"""The number of CPU threads for a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALL = 20_000_000  # parameters


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
