"""How many threads the lab's sums take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Use so many threads; with one, sums do not depend on the number of cores and a busy neighbor stalls no other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
