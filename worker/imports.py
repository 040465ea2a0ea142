"""Fast imports for processes that train or answer: no unneeded libraries, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from spard.models.unseen import unseen


@contextmanager
def light_imports() -> Iterator[None]:
    """Disable the garbage collector for the imports in the block, and exempt their objects from later collections.

    torch and transformers define half a million objects that are never freed. Traversing them again and again takes a
    fifth of the time of their import, and slows each full collection during training. transformers and accelerate also
    import optional libraries that are installed (boto3, scipy, sklearn), which nothing here uses: they are hidden.
    """
    gc.disable()
    try:
        with unseen("boto3", "scipy", "sklearn"):
            import spard.models.peft  # noqa: F401 - imports transformers before code that needs the hidden libraries
        yield
    finally:
        gc.enable()
        gc.freeze()
