"""Sign and pack released checkpoints as the final adapter is, and upload them under the attempt's own prefix."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.db.tables.job_records import Adapter
from app.storage import Storage, StorageError
from spard.release.archive import folder_name
from worker import child_files
from worker.results import pack
from worker.workdir import Folder

_ARCHIVE = "adapter.tar.gz"

log = logging.getLogger(__name__)


class CheckpointArchives:
    """Uploads the adapters of checkpoints that passed the gate; the child saves no others for it."""

    def __init__(self, storage: Storage, job_id: str, prefix: str, folder: Folder, key: Ed25519PrivateKey) -> None:
        self._storage, self._job_id, self._prefix, self._folder, self._key = storage, job_id, prefix, folder, key

    def upload(self, step: int) -> Adapter | None:
        """Sign, pack and upload the checkpoint of a step; return None when the storage does not take it.

        The child's copy of the checkpoint is deleted either way.
        """
        name = f"step-{step:06d}"
        key = f"{self._prefix}/epochs/{name}/{_ARCHIVE}"
        with TemporaryDirectory() as place:  # out of reach of the child, which still runs and could change files
            adapter, archive = Path(place) / "adapter", Path(place) / _ARCHIVE
            child_files.copy(self._folder.root, PurePosixPath("epochs", name, "adapter"), adapter)
            pack(adapter, archive, self._key, folder_name(self._job_id, step))
            try:
                stored = self._storage.upload_file(key, archive)
            except StorageError as error:
                log.warning("the checkpoint of step %d is not kept: %s", step, error)
                return None
            finally:
                shutil.rmtree(self._folder.epochs / name, ignore_errors=True)
        return {"storage_key": key, "sha256": stored.sha256, "bytes": stored.bytes}
