"""How a process that trains or answers starts: with the imports that it needs, and the garbage collector at rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from spard.models.unseen import unseen


@contextmanager
def light_imports() -> Iterator[None]:
    """Import inside the block what such a process needs, and exempt it from later collections of garbage.

    torch and transformers define half a million objects that stay. Looking at them again and again takes a fifth of
    the time of their import, and makes each full collection of a training longer. transformers and accelerate also
    import what they find, for losses of object detection, for assisted decoding and for jobs on SageMaker.
    """
    gc.disable()
    try:
        with unseen("boto3", "scipy", "sklearn"):
            import spard.models.peft  # noqa: F401 - transformers with it, before anything that may need those two
        yield
    finally:
        gc.enable()
        gc.freeze()
