"""Resume states, from which a killed run continues: tensors and JSON in a folder that appears atomically.

A resume state is `step-000120/` with `state.safetensors`, `state.json` and `manifest.json`, which has the digests of
both. It is written to a temporary folder, flushed to disk and renamed. If a file does not match the manifest, nothing
is loaded.

If the trained weights are sharded, each rank writes its shard, `shard-....safetensors`, with
`torch.distributed.checkpoint`; a run on any number of ranks can continue from these.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from spard import distributed
from spard.digests import file_sha256
from spard.errors import CorruptCheckpoint
from spard.models.sharding import own_part, shard_like

log = logging.getLogger(__name__)

_TENSORS, _STATE, _MANIFEST = "state.safetensors", "state.json", "manifest.json"


Empty = Callable[[str, torch.Size, torch.dtype], Tensor]  # allocates a tensor for loading


def whole_tensor(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor into which an unsharded tensor can be loaded; `name` is ignored."""
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A resume state on disk; `sha256` is the digest of its manifest, which covers all its files."""

    step: int
    path: Path
    sha256: str


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, object], keep: int = 2
) -> SavedState:
    """Write one resume state and delete the oldest until at most `keep` are left, this one among them."""
    aside = _aside(folder)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, aside / _TENSORS)
    return _publish(aside, folder, step, state, keep)


def save_together(
    folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, object], keep: int = 2
) -> SavedState | None:
    """Write one resume state from the shards of all ranks, each of which calls this.

    Return it on rank 0, None elsewhere.
    """
    aside = Path(distributed.broadcast_object(str(_aside(folder)) if distributed.rank() == 0 else ""))
    save_parts(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(aside), save_distributed=True))
    return _publish(aside, folder, step, state, keep) if distributed.rank() == 0 else None


def _aside(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(mkdtemp(prefix=".aside-", dir=folder))


def _publish(aside: Path, folder: Path, step: int, state: Mapping[str, object], keep: int) -> SavedState:
    """Write state and manifest beside the tensors, then rename the temporary folder to its final name."""
    (aside / _STATE).write_text(json.dumps(state))
    named = sorted(path.name for path in aside.iterdir())
    (aside / _MANIFEST).write_text(json.dumps({name: file_sha256(aside / name) for name in named}))
    # Before the rename: after a power failure the final name must not lead to files without their bytes.
    for name in (*named, _MANIFEST, "."):
        _flush(aside / name)
    path = folder / f"step-{step:06d}"
    # A killed attempt may have saved the same step.
    if path.exists():
        shutil.rmtree(path)
    # mkdtemp makes folders that only their owner may read.
    aside.chmod(0o755)
    aside.rename(path)
    _flush(folder)
    others = [each for each in _in_order(folder) if each != path]
    for old in others[: len(others) - keep + 1]:
        shutil.rmtree(old)
    return SavedState(step, path, file_sha256(path / _MANIFEST))


def load(path: Path, empty: Empty = whole_tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON of a resume state after verifying it; all ranks of a run call this.

    `empty` allocates each tensor; where that is distributed, only this rank's shard is loaded and returned. Raises
    `CorruptCheckpoint` if a file is missing or does not match the manifest.
    """
    verify(path)
    read = _whole if (path / _TENSORS).exists() else _parts
    return read(path, empty), json.loads((path / _STATE).read_text())


def _whole(path: Path, empty: Empty) -> dict[str, Tensor]:
    found = load_file(path / _TENSORS)
    return {name: own_part(shard_like(each, empty(name, each.shape, each.dtype))) for name, each in found.items()}


def _parts(path: Path, empty: Empty) -> dict[str, Tensor]:
    saved = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    found = {
        name: empty(name, each.size, each.properties.dtype)
        for name, each in saved.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load_parts(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=distributed.world_size() == 1)
    return {name: own_part(each) for name, each in found.items()}


def verify(path: Path) -> None:
    """Raise `CorruptCheckpoint` if a file of a resume state is missing or does not match the manifest."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        named = {_STATE, *manifest}
        if named == {_STATE}:
            raise KeyError(_TENSORS)
        wrong = sorted(name for name in named if manifest[name] != file_sha256(path / name))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"resume state {path.name} is incomplete") from error
    if wrong:
        raise CorruptCheckpoint(f"resume state {path.name} does not match its manifest: {', '.join(wrong)}")


def newest_first(folder: Path) -> Iterator[Path]:
    """Yield the valid resume states of a folder, newest first; log a warning for each invalid one."""
    for path in reversed(_in_order(folder)):
        try:
            verify(path)
        except CorruptCheckpoint as error:
            log.warning("%s; an older one is used", error)
        else:
            yield path


def _in_order(folder: Path) -> list[Path]:
    """Return the resume states of a folder by step; above step 999,999 the names alone would not sort."""
    return sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
