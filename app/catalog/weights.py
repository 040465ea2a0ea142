"""Read a base model's number of parameters from its folder, without loading it."""

from __future__ import annotations

from math import prod
from pathlib import Path

from spard.models.folder.reading import all_tensors


def parameters(source: str) -> int | None:
    """Return a model's number of parameters; None if its weights are not in a folder on this machine."""
    try:
        return sum(prod(tensor["shape"]) for _, tensor in all_tensors(Path(source))) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
