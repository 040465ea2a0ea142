"""The headers of safetensors files: names, types and shapes of tensors, without their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20  # the limit of safetensors itself
_LENGTH_BYTES = 8


class TensorEntry(TypedDict):
    """A tensor in a header: its type, its shape, and where its bytes begin and end."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def weight_files(folder: Path) -> set[str]:
    """Return the names of the files to load; other files may hold the same weights again."""
    index = folder / INDEX
    if not index.is_file():
        return {"model.safetensors"}
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def tensors(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """Return the header's entry of each tensor, and the offset of the tensors' bytes in the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        # The length is untrusted: a forged header must not make this process allocate gigabytes.
        header = json.loads(file.read(min(length, _MAX_HEADER)))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}, _LENGTH_BYTES + length


def all_tensors(folder: Path) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the name and header entry of every tensor in the files to load."""
    for name in sorted(weight_files(folder)):
        yield from tensors(folder / name)[0].items()


def weights_fault(folder: Path) -> str | None:
    """Return a sentence about a weight file that is missing or truncated, or None."""
    try:
        names = sorted(weight_files(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "the index of its weights cannot be read"
    for name in names:
        try:
            is_whole = _bytes(folder / name) <= (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_whole = False
        if not is_whole:
            return f"{name} is not whole, as after a download that broke off"
    return None


def _bytes(path: Path) -> int:
    """Return the length that the file must have: the end of its last tensor."""
    found, start = tensors(path)
    return start + max((tensor["data_offsets"][1] for tensor in found.values()), default=0)
