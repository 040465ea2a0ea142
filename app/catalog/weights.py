"""How large a base model is, read from its folder without loading it."""

from __future__ import annotations

from math import prod
from pathlib import Path

from spard.models.stored import read_header, weight_files


def parameters(source: str) -> int | None:
    """How many numbers the weights have; None where they are not in a folder on this machine."""
    folder = Path(source)
    try:
        return sum(_elements(folder / name) for name in weight_files(folder)) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def fault(folder: Path) -> str | None:
    """Say which file of weights is not there, or shorter than its header says, as after a broken download."""
    try:
        names = sorted(weight_files(folder))
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


def _elements(path: Path) -> int:
    return sum(prod(tensor["shape"]) for tensor in read_header(path)[0].values())


def _bytes(path: Path) -> int:
    """Return how long the file has to be: where its last tensor ends."""
    tensors, start = read_header(path)
    return start + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
