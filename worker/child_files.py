"""Read a child's files safely: plain files only, never through a link, which could lead to the worker's own secrets.

A child can write anything into its folder, even while the worker reads there. So each folder on the path is opened
relative to the one before, no link is followed, and the worker reads from the descriptor that it has checked.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ELOOP, ENOTDIR
from pathlib import Path, PurePath

from app.errors import AppError
from app.storage import Storage, StoredObject

FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a named pipe must not hang
FOLDER = FILE | os.O_DIRECTORY
_LINKS = (ELOOP, ENOTDIR)  # errors of opening a link, or a path below one


class UnsafeResult(AppError):
    """A job's process has left something other than plain files, or names a path outside its folder."""

    code = "unsafe_result"

    def __init__(self) -> None:
        super().__init__("The training process left something else than plain files, which is never taken.")


def require_plain(folder: Path) -> None:
    """Raise UnsafeResult unless everything below a folder is a plain file or a folder.

    Call it only after the child has ended: while it runs, it could replace a file after the check.
    """
    for place, folders, files in os.walk(folder, onerror=_raise):
        if not all(_is_plain(Path(place) / name) for name in (*folders, *files)):
            raise UnsafeResult
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise UnsafeResult


def upload(storage: Storage, key: str, root: Path, below: PurePath) -> StoredObject:
    """Upload the file at path `below` in a child's folder `root`.

    Raises UnsafeResult if it is not a plain file, FileNotFoundError if it does not exist.
    """
    with open_safely(root, below) as handle:
        # By the descriptor, not by its path: the child could have replaced the file since it was checked.
        return storage.upload_file(key, Path(f"/proc/self/fd/{handle}"))


def copy(root: Path, below: PurePath, to: Path) -> None:
    """Copy the folder at path `below` in a child's folder `root`, with all its files, to a new folder `to`.

    Raises UnsafeResult if it holds anything other than plain files and folders.
    """
    with open_safely(root, below, FOLDER) as handle:
        _copy(handle, to)


def _copy(folder: int, to: Path) -> None:
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in os.listdir(folder):
        with _open_entry(folder, name, FILE) as handle:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                _copy(handle, to / name)
            else:
                with open(handle, "rb", closefd=False) as source, (to / name).open("xb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)


@contextmanager
def open_safely(root: Path, below: PurePath, flags: int = FILE) -> Iterator[int]:
    """Yield a descriptor of the file (or with `FOLDER`, the folder) at path `below` in a child's folder `root`.

    Raises UnsafeResult for a link, a path that leaves the folder, or anything other than a plain file or folder.
    """
    if below.is_absolute() or ".." in below.parts or not below.parts:
        raise UnsafeResult
    handle = os.open(root, FOLDER)
    try:
        for name in below.parts[:-1]:
            with _open_entry(handle, name, FOLDER) as inner:
                handle, last = os.dup(inner), handle
                os.close(last)
        with _open_entry(handle, below.parts[-1], flags) as found:
            if flags == FILE and not stat.S_ISREG(os.fstat(found).st_mode):
                raise UnsafeResult
            yield found
    finally:
        os.close(handle)


@contextmanager
def _open_entry(folder: int, name: str, flags: int) -> Iterator[int]:
    """Yield a descriptor of one entry of an open folder; raise UnsafeResult if it is neither plain file nor folder."""
    try:
        handle = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in _LINKS:
            raise UnsafeResult from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode) and not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise UnsafeResult
        yield handle
    finally:
        os.close(handle)


def _is_plain(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _raise(error: OSError) -> None:
    raise error
