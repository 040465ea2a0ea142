"""How large a base model is, read from its folder without loading it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

_MAX_HEADER = 100 << 20  # as safetensors itself
_LENGTH_BYTES = 8


def parameters(source: str) -> int | None:
    """How many numbers the weights have; None where they are not in a folder on this machine."""
    folder = Path(source)
    try:
        return sum(_elements(folder / name) for name in _names(folder)) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _names(folder: Path) -> set[str]:
    """Return the names of the files that are loaded; others beside them may hold the same weights again."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _elements(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(min(length, _MAX_HEADER)))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
