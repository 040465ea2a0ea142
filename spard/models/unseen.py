"""Packages that another one would import wherever they are installed, kept out of its imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unseen(*packages: str) -> Iterator[None]:
    """Have imports inside the block find none of these packages; one that is loaded already stays in sight."""
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python has it: not to be found
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
