"""Objects as files under one folder, readable by this user only."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from app.storage.base import (
    CHUNK_BYTES,
    Digest,
    ObjectMissing,
    StorageError,
    StorageFull,
    Stored,
    checked,
    read_file,
    save_file,
)


class LocalStorage:
    """A key is a path below the root. Links are never followed: an object is a plain file that we wrote."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root.resolve()
        self._aside = self._root / ".aside"  # no key starts with a dot
        self._aside.mkdir(mode=0o700, exist_ok=True)

    def write(self, key: str, chunks: Iterable[bytes]) -> Stored:
        path, digest = self._path(key), Digest()
        aside = self._aside / token_hex(16)
        try:
            with open(aside, "xb", opener=_no_link) as file:
                for chunk in digest.through(chunks):  # what the source raises passes as it is
                    with _as_storage_error(key):
                        file.write(chunk)
                with _as_storage_error(key):
                    file.flush()
                    os.fsync(file.fileno())
            with _as_storage_error(key):
                self._make_folder(path.parent)
                os.replace(aside, path)
                _sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)
        return digest.stored()

    @contextmanager
    def open(self, key: str) -> Iterator[BinaryIO]:
        with _as_storage_error(key):
            fd = _no_link(str(self._path(key)), os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            yield file

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self.open(key) as file:
            file.seek(start)
            left = None if end is None else end - start
            while chunk := file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES)):
                left = None if left is None else left - len(chunk)
                yield chunk

    def size(self, key: str) -> int:
        with _as_storage_error(key):
            return self._path(key).lstat().st_size

    def exists(self, key: str) -> bool:
        path = self._path(key)
        return path.is_file() and not path.is_symlink()

    def delete(self, key: str) -> None:
        with _as_storage_error(key):
            self._path(key).unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        with _as_storage_error(prefix):
            if (folder := self._path(prefix)).is_dir():
                shutil.rmtree(folder)

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        return None

    def upload_file(self, key: str, path: Path) -> Stored:
        return self.write(key, read_file(path))

    def download_file(self, key: str, path: Path) -> Stored:
        return save_file(self.chunks(key), path)

    def _path(self, key: str) -> Path:
        path = self._root / checked(key)
        if not path.parent.resolve().is_relative_to(self._root):
            raise ValueError(f"not inside the storage: {key!r}")
        return path

    def _make_folder(self, folder: Path) -> None:
        """Make a folder durably: its name is on disk before anything in it counts."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(folder.parent)


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
