"""Resume states: what a killed run goes on from, tensors and JSON in a folder that appears whole or not at all.

A resume state is `step-000120/` with `state.safetensors`, `state.json` and `manifest.json`, the digests of both. It is
written aside, flushed to disk and renamed; what does not match its manifest is never loaded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from spard.digests import file_sha256
from spard.errors import CorruptCheckpoint

log = logging.getLogger(__name__)

_TENSORS, _STATE, _MANIFEST = "state.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class Saved:
    """A resume state on disk; `sha256` is that of its manifest, which names all its bytes."""

    step: int
    path: Path
    sha256: str


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int = 2) -> Saved:
    """Write one resume state and keep at most `keep`, this one among them."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=".aside-", dir=folder))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, aside / _TENSORS)
    (aside / _STATE).write_text(json.dumps(state))
    (aside / _MANIFEST).write_text(json.dumps({name: file_sha256(aside / name) for name in (_TENSORS, _STATE)}))
    for name in (_TENSORS, _STATE, _MANIFEST, "."):
        _flush(aside / name)
    path = folder / f"step-{step:06d}"
    if path.exists():
        shutil.rmtree(path)
    aside.chmod(0o755)
    aside.rename(path)
    _flush(folder)
    others = sorted(each for each in folder.glob("step-*") if each != path)
    for old in others[: len(others) - keep + 1]:
        shutil.rmtree(old)
    return Saved(step, path, file_sha256(path / _MANIFEST))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load the tensors and the state of a folder, verified."""
    verify(path)
    return load_file(path / _TENSORS), json.loads((path / _STATE).read_text())


def verify(path: Path) -> None:
    """Hold every byte against the manifest."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        wrong = [name for name in (_TENSORS, _STATE) if manifest[name] != file_sha256(path / name)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"resume state {path.name} is incomplete") from error
    if wrong:
        raise CorruptCheckpoint(f"resume state {path.name} does not match its manifest: {', '.join(wrong)}")


def newest_first(folder: Path) -> Iterator[Path]:
    """Yield the valid resume states of a folder, the newest first; warn of the others."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            verify(path)
        except CorruptCheckpoint as error:
            log.warning("%s; an older one is used", error)
        else:
            yield path


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
