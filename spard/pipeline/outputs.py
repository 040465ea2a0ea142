"""Where finished stages leave their outputs, so that a run that is repeated does not work them out again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol


class Outputs(Protocol):
    """JSON values by the name of the stage that made them."""

    def read(self, name: str) -> Any | None:
        """Return the value of that name; None if there is none."""
        ...

    def write(self, name: str, value: Any) -> None:
        """Keep a value under a name."""
        ...


class OutputsInMemory:
    """Outputs that end with the process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def read(self, name: str) -> Any | None:
        """Return a copy of the value of that name; None if there is none."""
        return json.loads(self._values[name]) if name in self._values else None

    def write(self, name: str, value: Any) -> None:
        """Keep a value as JSON, so that what cannot be stored fails here as it would in a folder."""
        self._values[name] = json.dumps(value)


class OutputsInFolder:
    """Outputs as `NAME.json` in a folder; none is ever half written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> Any | None:
        """Read `NAME.json`; None if it is not there."""
        path = self._path(name)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, name: str, value: Any) -> None:
        """Write `NAME.json` aside and move it into place."""
        aside = self._folder / f".{name}.{os.getpid()}"
        aside.write_text(json.dumps(value))
        aside.replace(self._path(name))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def begun_identity(folder: Path) -> str | None:
    """Return the identity of the run whose outputs are in a folder; None where there are none."""
    mark = folder / "identity"
    return mark.read_text() if mark.exists() else None


def open_outputs(folder: Path, identity: str) -> OutputsInFolder:
    """Open the outputs in `folder` if they are those of the run named by `identity`; else begin with none."""
    if begun_identity(folder) != identity:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "identity").write_text(identity)
    return OutputsInFolder(folder)
