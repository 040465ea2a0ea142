"""Stores for the outputs of finished stages, which a repeated run reads instead of computing them again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol


class Outputs(Protocol):
    """JSON values, each under the name of the stage that wrote it."""

    def read(self, name: str) -> Any | None:
        """Return the value of that name, or None."""
        ...

    def write(self, name: str, value: Any) -> None:
        """Store a value under a name."""
        ...


class OutputsInMemory:
    """Outputs that last as long as the process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def read(self, name: str) -> Any | None:
        """Return a copy of the value of that name, or None."""
        return json.loads(self._values[name]) if name in self._values else None

    def write(self, name: str, value: Any) -> None:
        """Store a value as JSON text, so that this store refuses the same values as a folder does."""
        self._values[name] = json.dumps(value)


class OutputsInFolder:
    """Outputs as files `NAME.json` in a folder, each replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Any | None:
        """Return the content of `NAME.json`, or None if there is no such file."""
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, name: str, value: Any) -> None:
        """Write `NAME.json` to a temporary file and rename it."""
        # All ranks write the same outputs, so each process needs a temporary name of its own.
        aside = self._folder / f".{name}.{os.getpid()}"
        aside.write_text(json.dumps(value))
        aside.replace(self._path(name))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def begun_identity(folder: Path) -> str | None:
    """Return the identity of the run whose outputs are in the folder, or None."""
    mark = folder / "identity"
    return mark.read_text() if mark.exists() else None


def open_outputs(folder: Path, identity: str) -> OutputsInFolder:
    """Open the outputs in `folder` if they belong to the run with this identity; else delete them and start empty."""
    if begun_identity(folder) != identity:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "identity").write_text(identity)
    return OutputsInFolder(folder)
