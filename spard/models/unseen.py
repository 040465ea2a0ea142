"""Hides optional packages that another package imports wherever they are installed.

It imports nothing but the standard library, so that it can hide a package before the first import of PEFT.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unseen(*packages: str) -> Iterator[None]:
    """Make imports of these packages fail inside the block; packages that are already loaded stay visible."""
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python has it: not to be found
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
