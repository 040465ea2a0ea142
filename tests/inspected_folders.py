"""Stubs of base models are inspected once a process of the tests: each inspection starts a process, niced, of its own.

A stub has no tokenizer, so that nothing of a publisher's runs: what is found depends on the bytes of its files alone.
Any other folder is inspected each time, as in the service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.files.template_look import FolderLook, inspect_folder

_LARGEST = 4096  # bytes of a stub's file
_NAMES = frozenset({"config.json", "model.safetensors"})

Stub = tuple[tuple[str, bytes], ...]


class Memory:
    """What was found of each stub, by the name of its folder and the bytes of its files."""

    def __init__(self, inspect: Callable[..., FolderLook]) -> None:
        self._inspect = inspect
        self._found: dict[tuple[str, Stub], FolderLook] = {}

    def inspect(self, folder: Path, arguments: Mapping[str, object] | None = None) -> FolderLook:
        """Return what `inspect_folder` finds, or has found of the same stub."""
        stub = read_stub(folder)
        if stub is None:
            return self._inspect(folder, arguments) if arguments else self._inspect(folder)
        key = folder.name, stub
        if key not in self._found:
            self._found[key] = self._inspect(folder)
        return self._found[key]


def read_stub(folder: Path) -> Stub | None:
    """Return the files of a stub; None for a folder with anything else in it."""
    paths = sorted(folder.iterdir())
    if any(path.name not in _NAMES or not path.is_file() or path.stat().st_size > _LARGEST for path in paths):
        return None
    return tuple((path.name, path.read_bytes()) for path in paths)


@contextmanager
def remembered_stubs() -> Iterator[None]:
    """Have the service in this process inspect each stub once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.catalog.fitness.inspect_folder", Memory(inspect_folder).inspect)
        yield
