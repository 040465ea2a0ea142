"""Upload the files that a later attempt continues from: outputs of finished stages and the two newest resume states.

The job's row names each file with its digest; the storage is never listed. Weights in resume states are not results,
and no route serves them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath

from app.db.tables.job_records import KeptFile, ResumeState
from app.storage import Storage, StorageError
from worker import child_files
from worker.workdir import Folder

log = logging.getLogger(__name__)

_STATES = 2

Discard = Callable[[Sequence[str]], None]  # deletes objects that no row names any more, now or later


class Keeper:
    """Uploads resume files under the attempt's own prefix; `record` is the list of them for the job's row.

    It begins with the `record` of earlier attempts, whose files are kept until newer ones replace them. `discard`
    deletes objects by key.
    """

    def __init__(
        self, storage: Storage, prefix: str, folder: Folder, record: ResumeState | None, discard: Discard
    ) -> None:
        self._storage, self._prefix, self._folder, self._discard = storage, prefix, folder, discard
        self.record: ResumeState = record or {"step": None, "files": []}
        self._surplus: list[KeptFile] = []
        self._missed: tuple[int, Path] | None = None

    def keep_stages(self) -> bool:
        """Upload the new outputs of stages; return True if there were any and the storage took them."""
        known = {file["path"] for file in self.record["files"]}
        new = [path for path in sorted(self._folder.stage.glob("*.json")) if self._name(path) not in known]
        return bool(new) and self._keep(new, self.record["step"])

    def keep_state(self, step: int, folder: Path) -> bool:
        """Upload the resume state of a step from its folder.

        Returns False if a newer one has replaced it on disk meanwhile, or the storage does not take it; `keep_missed`
        tries again.
        """
        paths = sorted(folder.glob("*"))
        is_kept = bool(paths) and self._keep(paths, step)
        self._missed = (step, folder) if paths and not is_kept else None
        return is_kept

    def keep_missed(self) -> int | None:
        """Retry the upload of the newest resume state if it failed; return its step if it succeeds now."""
        if self._missed is None:
            return None
        step, folder = self._missed
        return step if self.keep_state(step, folder) else None

    def take_surplus(self) -> list[KeptFile]:
        """Return, once, the files that `record` no longer names; delete them after the row is written."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def delete(self, surplus: Collection[KeptFile]) -> None:
        """Delete files that the job's row no longer names."""
        delete_kept(surplus, self._discard)

    def _keep(self, paths: Iterable[Path], step: int | None) -> bool:
        try:
            new = [self._upload(path) for path in paths]
        except (FileNotFoundError, StorageError) as error:
            log.warning("not kept: %s", error)
            return False
        paths_again = {file["path"] for file in new}
        files = [file for file in self.record["files"] if file["path"] not in paths_again] + new
        old = sorted({name for file in files if (name := _state_name(file))})[:-_STATES]
        self._surplus += [file for file in files if _state_name(file) in old]
        self.record = {"step": step, "files": [file for file in files if _state_name(file) not in old]}
        return True

    def _upload(self, path: Path) -> KeptFile:
        name = self._name(path)
        key = f"{self._prefix}/{name}"
        stored = child_files.upload(self._storage, key, self._folder.root, PurePosixPath(name))
        return {"path": name, "key": key, "sha256": stored.sha256}

    def _name(self, path: Path) -> str:
        """Return a path relative to the folder; raise UnsafeResult outside it, as the path comes from the child."""
        try:
            return path.relative_to(self._folder.root).as_posix()
        except ValueError:
            raise child_files.UnsafeResult from None


def delete_kept(files: Collection[KeptFile], discard: Discard) -> None:
    """Delete resume files that are no longer needed, as when the job has ended."""
    if files:
        discard([file["key"] for file in files])


def _state_name(file: KeptFile) -> str | None:
    """Return the name of the resume state that a file belongs to, None for a stage's output; names sort by step."""
    kind, _, rest = file["path"].partition("/")
    return rest.partition("/")[0] if kind == "checkpoints" else None
