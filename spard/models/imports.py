"""Faster imports of torch, transformers and PEFT, without optional packages that they load wherever they are installed.

The module imports nothing but the standard library, so that it can hide a package before their first import.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OPTIONAL = ("boto3", "scipy", "sklearn")  # transformers and accelerate load them, and nothing of ours needs it


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


@contextmanager
def light_imports(first: str | None = None) -> Iterator[None]:
    """Hide the `OPTIONAL` packages and pause garbage collection while the block imports modules.

    Only a process of our own may do so: a user's program may need the packages.

    torch and transformers define half a million objects that are never freed. Traversing them again and again takes a
    fifth of the time of their import, and slows each full collection later: their objects are exempted from it.

    first  a module to import before the block, the only one that does not see the packages, if the block needs them
    """
    gc.disable()
    try:
        with unseen(*OPTIONAL):
            if first is None:
                yield
            else:
                importlib.import_module(first)
        if first is not None:
            yield
    finally:
        gc.enable()
        gc.freeze()
