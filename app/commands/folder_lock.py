"""The lock that `spard up` holds on a data folder, which says where the service listens and which process it is."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from app.commands.terminal import CommandFailed


@contextmanager
def lock_folder(folder: Path) -> Iterator[TextIO]:
    """Keep a second `spard up` out of a data folder; the lock's file holds the address of the first.

    The kernel releases the lock of a process that was killed.
    """
    try:
        lock = (folder / "up.lock").open("a+")
    except OSError as error:
        raise CommandFailed(f"{folder / 'up.lock'} cannot be opened: {error.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            at = lock.readline().strip() or "an address that it takes just now"
            message = f"`spard up` runs on {folder} already, at {at}. Stop it with `spard down --data {folder}`"
            raise CommandFailed(f"{message}, or name another folder with --data.") from None
        lock.truncate(0)
        yield lock


def running_service(folder: Path) -> tuple[str, int | None] | None:
    """Return the address and the process id of the service that runs on a data folder; None if none does.

    Until it listens the address is empty, and the process id None.
    """
    try:
        lock = (folder / "up.lock").open()
    except FileNotFoundError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            url, _, process_id = lock.read().strip().partition("\n")
            return url, int(process_id) if process_id else None
    return None
