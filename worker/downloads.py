"""Objects downloaded into a folder that children write to: whole or not at all, going on where a download broke off.

What has come lies beside the file, under a name with the object's digest. No link is followed. Workers that share the
folder download an object once; the kernel opens the lock of one that was killed.
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
_READINGS = 2  # of a whole object whose bytes are wrong: a storage may err once
_CHUNK_BYTES = 1 << 20
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Damaged(Exception):
    """An object's bytes are not those of its digest."""


def download(storage: Storage, key: str, sha256: str, folder: int, name: str, go_on: Callable[[], None]) -> bool:
    """Write an object to the file `name` of an open folder; False when somebody has. `go_on` is called often.

    Raises `Damaged`, `StorageError` (`ObjectMissing` if it is gone), and OSError when the folder does not take it.
    """
    aside = f".part-{sha256}"
    if _inode(folder, name) is not None:
        return False
    with _alone(folder, aside, name, go_on) as part:
        if part is None:
            return False
        try:
            is_right = _complete(storage, key, sha256, part, go_on)
        except OSError:  # a disk is not left full of what no job can use
            os.unlink(aside, dir_fd=folder)
            raise
        if is_right:
            os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
            return True
        os.unlink(aside, dir_fd=folder)
    raise Damaged(key)


def _complete(storage: Storage, key: str, sha256: str, part: BinaryIO, go_on: Callable[[], None]) -> bool:
    """Append what is missing, and all of it if what came was wrong; False when the object is."""
    readings = _READINGS
    while True:
        came = os.fstat(part.fileno()).st_size
        if _append(storage, key, part, go_on) == sha256:
            return True
        part.truncate(0)
        if not came and (readings := readings - 1) == 0:
            return False


def _append(storage: Storage, key: str, part: BinaryIO, go_on: Callable[[], None]) -> str:
    """Append what is missing, and return the digest of it all."""
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
    """Open what has come, once nobody else writes to it; None if the whole file is there by then."""
    while True:
        with open(os.open(aside, _OPEN, 0o600, dir_fd=folder), "r+b") as part:
            handle = part.fileno()
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("what lies in the place of a download is no file")
            _lock(handle, go_on)
            is_ours = _inode(folder, aside) == os.fstat(handle).st_ino  # else it was moved into place, or removed
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
