"""Store objects as files in one folder, readable by this user only."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from stat import S_ISREG
from typing import BinaryIO

from app.storage.base import (
    CHUNK_BYTES,
    Digest,
    ListedObject,
    ObjectMissing,
    StorageError,
    StorageFull,
    StoredObject,
    check_key,
    is_key,
    read_file,
    save_file,
)


class LocalStorage:
    """Objects as files below a root folder. Links are never followed: an object is a plain file that we wrote."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._aside = self._root / ".aside"  # no key starts with a dot
        self._aside.mkdir(mode=0o700, exist_ok=True)

    def write(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Write aside, flush to disk, then rename: a reader sees the whole object or none."""
        path, digest = self._path(key), Digest()
        aside = self._aside / token_hex(16)
        try:
            with _write_file(aside, key) as file:
                for chunk in digest.count_chunks(chunks):  # exceptions of the source are not storage errors
                    with _as_storage_error(key):
                        file.write(chunk)
                with _as_storage_error(key):
                    file.flush()
                    # Before the rename: otherwise a power failure may leave the name with no content.
                    os.fsync(file.fileno())
            with _as_storage_error(key):
                self._make_folder(path.parent)
                os.replace(aside, path)
                _sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)
        return digest.result()

    @contextmanager
    def open(self, key: str) -> Iterator[BinaryIO]:
        """Open the file; it stays readable if the object is deleted in the meantime."""
        with _as_storage_error(key):
            # O_NOFOLLOW: a link under the key's name is not opened.
            fd = _no_link(str(self._path(key)), os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            yield file

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a range, at most `CHUNK_BYTES` at a time."""
        with self.open(key) as file:
            file.seek(start)
            left = None if end is None else end - start
            while chunk := file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES)):
                left = None if left is None else left - len(chunk)
                yield chunk

    def size(self, key: str) -> int:
        """Return the file's length in bytes."""
        with _as_storage_error(key):
            return self._path(key).lstat().st_size

    def exists(self, key: str) -> bool:
        """Return True if there is a plain file; a link or a folder is not an object."""
        path = self._path(key)
        return path.is_file() and not path.is_symlink()

    def delete(self, key: str) -> None:
        """Remove the file, if there is one."""
        with _as_storage_error(key):
            self._path(key).unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        """Remove the folder of that name and its contents, if there is one."""
        with _as_storage_error(prefix):
            if (folder := self._path(prefix)).is_dir():
                shutil.rmtree(folder)

    def move(self, key: str, to: str) -> None:
        """Rename the file durably, replacing a file of the new name."""
        with _as_storage_error(key):
            path = self._path(to)
            self._make_folder(path.parent)
            os.replace(self._path(key), path)
            _sync_folder(path.parent)

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        """Walk the folder of that name, in no particular order."""
        with _as_storage_error(prefix):
            for folder, _, names in os.walk(self._path(prefix) if prefix else self._root):
                for name in names:
                    path = Path(folder, name)
                    key = path.relative_to(self._root).as_posix()
                    if is_key(key) and (found := _describe_file(key, path)):
                        yield found

    def clear_unfinished(self, before: datetime, is_ours: Callable[[str], bool]) -> int:
        """Remove old files that were written aside; all are ours, as nobody else writes to the folder."""
        cleared = 0
        with _as_storage_error("unfinished writes"):
            for path in self._aside.iterdir():
                if (found := _describe_file(path.name, path)) and found.modified_at < before:
                    path.unlink(missing_ok=True)
                    cleared += 1
        return cleared

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        """Return None: a folder has no links."""
        return None

    def upload_file(self, key: str, path: Path) -> StoredObject:
        """Copy a file into the storage."""
        return self.write(key, read_file(path))

    def download_file(self, key: str, path: Path) -> StoredObject:
        """Copy an object to a file."""
        return save_file(self.chunks(key), path)

    def _path(self, key: str) -> Path:
        path = self._root / check_key(key)
        # A link inside of the root may lead out of it; keys alone cannot.
        if not path.parent.resolve().is_relative_to(self._root):
            raise ValueError(f"not inside the storage: {key!r}")
        return path

    def _make_folder(self, folder: Path) -> None:
        """Create a folder durably: its name is on disk before anything is stored in it."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            # The new name is durable only once its parent folder is flushed.
            _sync_folder(folder.parent)


def _describe_file(key: str, path: Path) -> ListedObject | None:
    """Describe a plain file; None for anything else, and for a file that was just deleted."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not S_ISREG(status.st_mode):
        return None
    return ListedObject(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


@contextmanager
def _write_file(path: Path, key: str) -> Iterator[BinaryIO]:
    """Open a new file for writing; the caller flushes it.

    Errors on closing are ignored, because closing only retries a write that has failed already.
    """
    with _as_storage_error(key):
        file = open(path, "xb", opener=_no_link)  # noqa: SIM115 - closed below
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _as_storage_error(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(f"The object {key} is missing.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFull(f"No room is left to store {key}.") from error
        raise StorageError(f"The storage failed at {key}: {os.strerror(error.errno or 0)}.") from error
