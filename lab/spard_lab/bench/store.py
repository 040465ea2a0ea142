"""Finished runs on disk: one JSON file for each, named after what decides its numbers, never half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_run(folder: Path, key: str) -> dict[str, Any] | None:
    """Read a run that is done; None if there is none."""
    path = _path(folder, key)
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def write_run(folder: Path, key: str, found: dict[str, Any]) -> None:
    """Write what a run found; one that is there under the same key is replaced."""
    write_aside(_path(folder, key), json.dumps(found, indent=1) + "\n")


def write_aside(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _path(folder: Path, key: str) -> Path:
    return folder / "runs" / f"{key[:24]}.json"
