"""What a storage is: objects under server-made keys, whole or absent, with what every storage of ours shares.

Writers never overwrite a key that somebody may be reading: an attempt writes under a prefix of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from app.errors import Unavailable

CHUNK_BYTES = 1 << 20
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")
_MAX_KEY = 900  # S3 allows 1,024 bytes, of which a deployment's prefix takes some


class StorageError(Unavailable):
    """The storage did not do what was asked; the message names the key, never a path or an address."""

    code = "storage_unavailable"


class StorageFull(StorageError):
    """No room is left; nothing of the object was kept."""

    status = 507
    code = "storage_full"


class ObjectMissing(StorageError):
    """A row points at an object that is not there."""

    status = 500
    code = "object_missing"


@dataclass(frozen=True, slots=True)
class Stored:
    """What was written: enough to prove later that the bytes are the same."""

    bytes: int
    sha256: str


class Storage(Protocol):
    """Objects under keys such as `tenants/org-1/files/file-1`. Ranges are half open: `start` in, `end` out."""

    def write(self, key: str, chunks: Iterable[bytes]) -> Stored: ...

    def open(self, key: str) -> AbstractContextManager[BinaryIO]: ...

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]: ...

    def size(self, key: str) -> int: ...

    def exists(self, key: str) -> bool: ...

    def delete(self, key: str) -> None: ...

    def delete_prefix(self, prefix: str) -> None: ...

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None: ...

    def upload_file(self, key: str, path: Path) -> Stored: ...

    def download_file(self, key: str, path: Path) -> Stored: ...


class Digest:
    """Counts and hashes the chunks that pass through."""

    def __init__(self) -> None:
        self._bytes = 0
        self._sha256 = hashlib.sha256()

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._bytes += len(chunk)
            self._sha256.update(chunk)
            yield chunk

    def stored(self) -> Stored:
        return Stored(self._bytes, self._sha256.hexdigest())


def checked(key: str) -> str:
    """The key, if it is one that the service makes: plain segments, no leading dot, nothing absolute."""
    if len(key) > _MAX_KEY or not _KEY.fullmatch(key):
        raise ValueError(f"not a storage key: {key!r}")
    return key


def read_file(path: Path) -> Iterator[bytes]:
    """The bytes of a file, a chunk at a time."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def save_file(chunks: Iterable[bytes], path: Path) -> Stored:
    """Write chunks to a file that appears whole or not at all."""
    digest = Digest()
    aside = path.with_name(f"{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.writelines(digest.through(chunks))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return digest.stored()
