"""The service's own folder: the option `--data` of commands that work on it, and the lock of `spard up`.

The lock file holds the service's address and process id.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from app.commands.terminal import CommandFailed


def use_folder(folder: Path | None) -> Path | None:
    """Set SPARD_DATA_DIR, which the settings read, to the folder of `--data`, if it was given."""
    if folder is not None:
        os.environ["SPARD_DATA_DIR"] = str(folder.resolve())
    return folder


# The option's callback does the work, so commands need no line of their own for it.
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", callback=use_folder, help="The service's data folder; default: SPARD_DATA_DIR, or else `data`."
    ),
]


@contextmanager
def lock_folder(folder: Path) -> Iterator[TextIO]:
    """Lock a data folder against a second `spard up`, and yield the open lock file to write the address into.

    The kernel releases the lock of a process that was killed. Raises CommandFailed if a service runs on the folder.
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
    """Return the address and process id of the service that runs on a data folder; None if none does.

    Until the service listens, its address is "" and its process id None.
    """
    try:
        lock = (folder / "up.lock").open()
    except FileNotFoundError:
        return None
    with lock:
        try:
            # A shared lock: two callers that look at the same time must not take each other for the service.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            url, _, process_id = lock.read().strip().partition("\n")
            return url, int(process_id) if process_id else None
    return None
