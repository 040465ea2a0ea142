"""Keeps in storage what a later attempt goes on from: the outputs of finished stages and the newest two checkpoints.

The job's row names each piece with its digest; nothing is ever found by listing. Weights kept here are no results:
no route serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.storage import Storage, StorageError
from worker.folder import Folder

log = logging.getLogger(__name__)

Record = dict[str, Any]  # step, and files: path below the job's folder, storage key, sha256

_CHECKPOINTS = 2


class Keeper:
    """Uploads under the attempt's own prefix and says in `record` what the row is to name."""

    def __init__(self, storage: Storage, prefix: str, folder: Folder, record: Record | None) -> None:
        self._storage, self._prefix, self._folder = storage, prefix, folder
        self.record: Record = record or {"step": None, "files": []}
        self._surplus: list[Record] = []

    def keep_stages(self) -> bool:
        """Upload the outputs of stages that are not kept yet; whether there were any."""
        known = {file["path"] for file in self.record["files"]}
        new = [path for path in sorted(self._folder.stage.glob("*.json")) if self._name(path) not in known]
        return bool(new) and self._keep(new, self.record["step"])

    def keep_checkpoint(self, step: int, folder: Path) -> bool:
        """Upload a checkpoint; False when it was replaced on disk meanwhile, or the storage does not take it."""
        paths = sorted(folder.glob("*"))
        return bool(paths) and self._keep(paths, step)

    def delete_surplus(self) -> None:
        """Delete the checkpoints that the row names no more; to be called once it is written."""
        _delete(self._storage, self._surplus)
        self._surplus = []

    def _keep(self, paths: Iterable[Path], step: int | None) -> bool:
        try:
            new = [self._upload(path) for path in paths]
        except (FileNotFoundError, StorageError) as error:
            log.warning("not kept: %s", error)
            return False
        paths_again = {file["path"] for file in new}
        files = [file for file in self.record["files"] if file["path"] not in paths_again] + new
        old = sorted({name for file in files if (name := _checkpoint_of(file))})[:-_CHECKPOINTS]
        self._surplus += [file for file in files if _checkpoint_of(file) in old]
        self.record = {"step": step, "files": [file for file in files if _checkpoint_of(file) not in old]}
        return True

    def _upload(self, path: Path) -> Record:
        name = self._name(path)
        key = f"{self._prefix}/{name}"
        return {"path": name, "key": key, "sha256": self._storage.upload_file(key, path).sha256}

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder.root).as_posix()


def delete_kept(storage: Storage, record: Record | None) -> None:
    """The job has ended: nobody goes on from here."""
    _delete(storage, (record or {}).get("files", []))


def _delete(storage: Storage, files: Iterable[Record]) -> None:
    for file in files:
        try:
            storage.delete(file["key"])
        except StorageError as error:
            log.warning("%s is left in storage: %s", file["key"], error)


def _checkpoint_of(file: Record) -> str | None:
    """The name of the checkpoint that a file belongs to; names sort as steps do."""
    kind, _, rest = file["path"].partition("/")
    return rest.partition("/")[0] if kind == "checkpoints" else None
