"""Folders that belong to one process each: locked as long as it lives, removed by others once it has died.

A folder gets its name when it is locked already, so that nobody takes a new one for abandoned. No process waits for
another's lock: one that is stopped, as by a debugger or a full disk of its container, keeps its locks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex

_LOCK = "lock"


def create(root: Path, inner: Sequence[str] = ()) -> int:
    """Create and lock a folder with the folders `inner` in it; return the lock's descriptor.

    Only its owner may enter it. Raises OSError if there is a folder of this name that is not empty.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    while True:
        new = root.with_name(f".{root.name}-{token_hex(4)}")
        new.mkdir(mode=0o700)
        lock = _lock(new)
        if lock is None:
            continue  # `remove_abandoned` was faster
        try:
            for each in inner:
                (new / each).mkdir(mode=0o700, parents=True)
            new.rename(root)
        except BaseException:
            _remove(new, lock)
            raise
        return lock


@contextmanager
def use(root: Path, inner: Sequence[str] = ()) -> Iterator[None]:
    """Create a folder for the time of the block (see `create`)."""
    lock = create(root, inner)
    try:
        yield
    finally:
        _remove(root, lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders below `parent` whose processes have died: the kernel has released their locks."""
    for root in parent.glob("*/"):
        lock = _lock(root)
        if lock is not None:
            _remove(root, lock)


def _remove(root: Path, lock: int) -> None:
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)


def _lock(root: Path) -> int | None:
    """Lock a folder and return the lock's descriptor; None if another process holds it, or the folder is gone."""
    path = root / _LOCK
    with suppress(FileNotFoundError, BlockingIOError), ExitStack() as opened:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        opened.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who removed the folder may have deleted the file between the two calls, and a third has created it again.
        if os.path.samestat(os.fstat(lock), path.stat()):
            opened.pop_all()
            return lock
    return None
