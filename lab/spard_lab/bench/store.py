"""Finished runs on disk: one JSON file per run, named after the digest of its inputs, written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_run(folder: Path, key: str) -> dict[str, Any] | None:
    """Return a stored run, or None."""
    path = _path(folder, key)
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def write_run(folder: Path, key: str, found: dict[str, Any]) -> None:
    """Store a run, replacing one with the same key."""
    write_aside(_path(folder, key), json.dumps(found, indent=1) + "\n")


def write_aside(path: Path, text: str) -> None:
    """Write a file atomically, through a temporary file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _path(folder: Path, key: str) -> Path:
    return folder / "runs" / f"{key[:24]}.json"
