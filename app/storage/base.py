"""What a storage is: objects under server-made keys, whole or absent, with what every storage of ours shares.

Writers never overwrite a key that somebody may be reading: an attempt writes under a prefix of its own.
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


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing tells of it; the time is the storage's."""

    key: str
    bytes: int
    modified_at: datetime


class Storage(Protocol):
    """Objects under keys such as `projects/org-1/files/file-1`; what does not work raises `StorageError`."""

    def write(self, key: str, chunks: Iterable[bytes]) -> Stored:
        """Store an object, whole or not at all; what `chunks` raises passes as it is."""
        ...

    def open(self, key: str) -> AbstractContextManager[BinaryIO]:
        """Open an object to be read; `ObjectMissing` if there is none."""
        ...

    def chunks(self, key: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from `start` up to, not including, `end`; to the last one if `end` is None."""
        ...

    def size(self, key: str) -> int:
        """Return the length in bytes; `ObjectMissing` if there is no such object."""
        ...

    def exists(self, key: str) -> bool:
        """Return whether there is an object of this key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Delete all objects below a prefix, which is whole segments of a key."""
        ...

    def move(self, key: str, to: str) -> None:
        """Give an object another key; `ObjectMissing` if there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield the objects below a prefix, but none with a name that our keys cannot have."""
        ...

    def clear_unfinished(self, before: datetime, is_ours: Callable[[str], bool]) -> int:
        """Remove unfinished writes of our keys that began before a time; return how many there were."""
        ...

    def presigned_url(self, key: str, filename: str, ttl_s: int) -> str | None:
        """Return a link that is good for `ttl_s` seconds and saves as `filename`; None where there are no links."""
        ...

    def upload_file(self, key: str, path: Path) -> Stored:
        """Store the bytes of a local file as an object."""
        ...

    def download_file(self, key: str, path: Path) -> Stored:
        """Write an object to a local file, which appears whole or not at all."""
        ...


class Digest:
    """Counts and hashes the chunks that pass through."""

    def __init__(self) -> None:
        self._bytes = 0
        self._sha256 = hashlib.sha256()

    def count_chunks(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks unchanged; they count as they are taken."""
        for chunk in chunks:
            self._bytes += len(chunk)
            self._sha256.update(chunk)
            yield chunk

    def result(self) -> Stored:
        """Return what has passed so far."""
        return Stored(self._bytes, self._sha256.hexdigest())


def is_key(name: str) -> bool:
    """Return whether the service could have made a key: plain segments, no leading dot."""
    return len(name) <= _MAX_KEY and _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return the key if the service could have made it; else raise ValueError."""
    if not is_key(key):
        raise ValueError(f"not a storage key: {key!r}")
    return key


def read_file(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, a chunk at a time."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def save_file(chunks: Iterable[bytes], path: Path) -> Stored:
    """Write chunks to a file that appears whole or not at all."""
    digest = Digest()
    aside = path.with_name(f"{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.writelines(digest.count_chunks(chunks))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return digest.result()
