"""Set the number of CPU threads of the lab's computations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int = 1) -> Iterator[None]:
    """Use `count` threads inside the context.

    With one thread, sums do not depend on the number of cores, and a busy machine does not stall threads that wait for
    each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
