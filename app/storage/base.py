"""Define the storage interface: objects under server-made keys, whole or absent.

Writers never overwrite a key that somebody may be reading: each attempt writes under its own prefix.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Protocol

from app.errors import Unavailable

CHUNK_BYTES = 1 << 20
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")
_MAX_KEY = 900  # S3 allows 1,024 bytes, including a deployment's prefix


class StorageError(Unavailable):
    """The storage failed; the message names the key, but never a path or an address."""

    code = "storage_unavailable"


class StorageFull(StorageError):
    """The storage is full; nothing of the object was kept."""

    status = 507
    code = "storage_full"


class ObjectMissing(StorageError):
    """There is no object under a key that a row refers to."""

    status = 500
    code = "object_missing"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The size and digest of a written object."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing; the time is the storage's."""

    key: str
    bytes: int
    modified_at: datetime


class Storage(Protocol):
    """Objects under keys such as `tenants/org-1/files/file-1`; every failure raises `StorageError`.

    An object is written and read in chunks of bytes:

        stored = storage.write("tenants/org-1/files/file-1", [b"one ", b"two"])
        content = b"".join(storage.chunks("tenants/org-1/files/file-1"))
    """

    def write(self, key: str, chunks: Iterable[bytes]) -> StoredObject:
        """Store an object, whole or not at all; return its size and digest. Exceptions of `chunks` pass unchanged."""
        ...

    def open(self, key: str) -> AbstractContextManager[BinaryIO]:
        """Open an object for reading; raise `ObjectMissing` if there is none."""
        ...

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` up to, but not including, `end`; up to the last one if `end` is None."""
        ...

    def size(self, key: str) -> int:
        """Return the length in bytes; raise `ObjectMissing` if there is no such object."""
        ...

    def exists(self, key: str) -> bool:
        """Return True if there is an object with this key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a missing object is not an error."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Delete all objects below a prefix, which consists of whole segments of a key."""
        ...

    def move(self, key: str, to: str) -> None:
        """Rename an object; raise `ObjectMissing` if there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        """Yield the objects below a prefix, except those with names that our keys cannot have."""
        ...

    def clear_unfinished(self, before: datetime, is_ours: Callable[[str], bool]) -> int:
        """Remove unfinished writes of our keys that began before a time; return their number."""
        ...

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        """Return a link valid for `ttl_s` seconds that saves as `filename`; None without support for links."""
        ...

    def upload_file(self, key: str, path: Path) -> StoredObject:
        """Store the bytes of a local file as an object."""
        ...

    def download_file(self, key: str, path: Path) -> StoredObject:
        """Write an object to a local file, which appears whole or not at all."""
        ...


class Digest:
    """Counts and hashes the chunks of a stream."""

    def __init__(self) -> None:
        self._bytes = 0
        self._sha256 = hashlib.sha256()

    def count_chunks(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks unchanged; each is counted when it is consumed."""
        for chunk in chunks:
            self._bytes += len(chunk)
            self._sha256.update(chunk)
            yield chunk

    def result(self) -> StoredObject:
        """Return the size and digest of the chunks so far."""
        return StoredObject(self._bytes, self._sha256.hexdigest())


def is_key(name: str) -> bool:
    """Return True if the service can have made this key: plain segments without a leading dot."""
    return len(name) <= _MAX_KEY and _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return the key if the service can have made it; raise `ValueError` otherwise."""
    if not is_key(key):
        raise ValueError(f"not a storage key: {key!r}")
    return key


def read_file(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def save_file(chunks: Iterable[bytes], path: Path) -> StoredObject:
    """Write chunks to a file, which appears whole or not at all; return its size and digest."""
    digest = Digest()
    aside = path.with_name(f"{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.writelines(digest.count_chunks(chunks))
        # A rename within one folder is atomic, so nobody sees a part of the file.
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return digest.result()
