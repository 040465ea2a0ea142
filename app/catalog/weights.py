"""How large a base model is, read from its folder without loading it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

_MAX_HEADER = 100 << 20  # as safetensors itself
_LENGTH_BYTES = 8


def parameters(source: str) -> int | None:
    """How many numbers the weights have; None where they are not in a folder on this machine."""
    folder = Path(source)
    try:
        return sum(_elements(folder / name) for name in _names(folder)) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def fault(folder: Path) -> str | None:
    """Say which file of weights is not there, or shorter than its header says, as after a broken download."""
    try:
        names = sorted(_names(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "the index of its weights cannot be read"
    for name in names:
        try:
            is_whole = _bytes(folder / name) <= (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        except (ValueError, KeyError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            return f"{name} is not whole, as after a download that broke off"
    return None


def _names(folder: Path) -> set[str]:
    """Return the names of the files that are loaded; others beside them may hold the same weights again."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors"}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _elements(path: Path) -> int:
    return sum(prod(tensor["shape"]) for tensor in _tensors(path)[0])


def _bytes(path: Path) -> int:
    """Return how long the file has to be: where its last tensor ends."""
    tensors, start = _tensors(path)
    return start + max((tensor["data_offsets"][1] for tensor in tensors), default=0)


def _tensors(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return what the header says of each tensor, and where their bytes begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(min(length, _MAX_HEADER)))
    return [tensor for name, tensor in header.items() if name != "__metadata__"], _LENGTH_BYTES + length
