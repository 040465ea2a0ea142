"""Download objects into a folder that children can write to, completely or not at all; resume broken downloads.

A partial download is stored beside the file, under a name with the object's digest. No link is followed. Workers that
share the folder download an object once: they lock the partial file, and the kernel unlocks it when a worker is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from app.storage import Storage

_LOOK_S = 0.2
_READINGS = 2  # complete downloads with a wrong digest before giving up: a storage may err once
_CHUNK_BYTES = 1 << 20
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Damaged(Exception):
    """The bytes of an object do not have the expected digest."""


def download(storage: Storage, key: str, sha256: str, folder: int, name: str, go_on: Callable[[], None]) -> bool:
    """Download an object to the file `name` in an open folder; return False if the file is there already.

    `folder` is the descriptor of an open directory. `go_on` is called between chunks and may raise to stop. Raises
    `Damaged` for a wrong digest, `StorageError` (`ObjectMissing` if the object is gone), and OSError when the folder
    cannot be written to.
    """
    aside = f".part-{sha256}"
    if _inode(folder, name) is not None:
        return False
    with _alone(folder, aside, name, go_on) as part:
        if part is None:
            return False
        try:
            is_right = _complete(storage, key, sha256, part, go_on)
        except OSError:  # most likely a full disk: free the space of the partial file
            os.unlink(aside, dir_fd=folder)
            raise
        if is_right:
            os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        os.unlink(aside, dir_fd=folder)
    raise Damaged(key)


def _complete(storage: Storage, key: str, sha256: str, part: BinaryIO, go_on: Callable[[], None]) -> bool:
    """Complete a partial download; return False if the object itself has the wrong digest.

    When resuming gives a wrong digest, the partial file may have been bad, so the object is downloaded from the start.
    """
    readings = _READINGS
    while True:
        came = os.fstat(part.fileno()).st_size
        if _append(storage, key, part, go_on) == sha256:
            return True
        part.truncate(0)
        # Only a download from byte 0 proves that the object is wrong; a resumed one does not count.
        if not came and (readings := readings - 1) == 0:
            return False


def _append(storage: Storage, key: str, part: BinaryIO, go_on: Callable[[], None]) -> str:
    """Append the missing bytes to the partial file and return the SHA-256 of the whole."""
    whole = hashlib.sha256()
    part.seek(0)
    while chunk := part.read(_CHUNK_BYTES):
        whole.update(chunk)
    for chunk in storage.chunks(key, part.tell()):
        go_on()
        part.write(chunk)
        whole.update(chunk)
    part.flush()
    return whole.hexdigest()


@contextmanager
def _alone(folder: int, aside: str, name: str, go_on: Callable[[], None]) -> Iterator[BinaryIO | None]:
    """Open and lock the partial file once no other worker holds it; yield None if the complete file exists by then."""
    while True:
        with open(os.open(aside, _OPEN, 0o600, dir_fd=folder), "r+b") as part:
            handle = part.fileno()
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("what lies in the place of a download is no file")
            _lock(handle, go_on)
            # While we waited for the lock its last holder may have renamed or removed the file that we have open.
            is_ours = _inode(folder, aside) == os.fstat(handle).st_ino
            if _inode(folder, name) is not None:
                if is_ours:
                    os.unlink(aside, dir_fd=folder)
                yield None
                return
            if is_ours:
                yield part
                return


def _lock(handle: int, go_on: Callable[[], None]) -> None:
    while True:
        go_on()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        else:
            return


def _inode(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None
