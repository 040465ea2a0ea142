"""What a child has left, taken as plain files: never through a link, which the worker would follow to its own secrets.

A child writes what it likes into its folder, also while the worker reads there. So every folder on the way to a file is
opened by itself, no link is followed, and what is read is what was opened.
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
from app.storage import Storage, Stored

FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would keep whoever opens it waiting
FOLDER = FILE | os.O_DIRECTORY
_LINKS = (ELOOP, ENOTDIR)  # what opening a link, or something below one, fails with


class UnsafeResult(AppError):
    """The process of a job has left something else than plain files, or names a place outside its folder."""

    code = "unsafe_result"

    def __init__(self) -> None:
        super().__init__("The training process left something else than plain files, which is never taken.")


def require_plain(folder: Path) -> None:
    """Raise UnsafeResult unless everything below a folder is a plain file or a folder; its writer has to be gone."""
    for place, folders, files in os.walk(folder, onerror=_raise):
        if not all(_is_plain(Path(place) / name) for name in (*folders, *files)):
            raise UnsafeResult
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise UnsafeResult


def upload(storage: Storage, key: str, root: Path, below: PurePath) -> Stored:
    """Upload the file `below` a child's folder; raise UnsafeResult for anything else, FileNotFoundError for none."""
    with open_safely(root, below) as handle:
        return storage.upload_file(key, Path(f"/proc/self/fd/{handle}"))


def copy(root: Path, below: PurePath, to: Path) -> None:
    """Copy the folder `below` a child's folder with all plain files in it; raise UnsafeResult for anything else."""
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
    """Open the file, or with `FOLDER` the folder, `below` a child's; raise UnsafeResult for anything else."""
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
    """Open one entry of a folder that is a plain file or a folder."""
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
