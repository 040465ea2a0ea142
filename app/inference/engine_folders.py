"""The folders of one process's engines; folders of processes that have died are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from threading import Lock


class EngineFolders:
    """This process's folder below `root`, locked while the process lives, with a subfolder for each engine."""

    def __init__(self, root: Path) -> None:
        self._root, self._lock = root, Lock()
        self._own: Path | None = None

    def new(self) -> Path:
        """Return a path for a new engine's folder, without creating it; safe from any thread."""
        return self.own_folder() / token_hex(6)

    def own_folder(self) -> Path:
        """Return this process's folder, created and locked by the first call."""
        with self._lock:
            if self._own is None:
                self._own = self._make()
            return self._own

    def remove(self) -> None:
        """Remove this process's folder with all engines' folders."""
        if self._own:
            shutil.rmtree(self._own, ignore_errors=True)

    def _make(self) -> Path:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Between the creation of a folder's lock and the locking, another process would take it for abandoned.
        with _exclusive(self._root / ".lock"):
            for left in self._root.iterdir():
                if _is_abandoned(left):
                    shutil.rmtree(left, ignore_errors=True)
            own = self._root / token_hex(8)
            own.mkdir(mode=0o700)
            lock = os.open(own / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return own


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if it is missing; wait for another process that holds it."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
