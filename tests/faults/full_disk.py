"""A disk without room: writes of a process fail with ENOSPC as long as a flag lies there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Pool, event

from app.storage import local

_ANY_PAGES = 1 << 30


def fill(flag: Path) -> None:
    """Let writes of this process to a local storage find no room while `flag` exists."""
    opened = local._write_file

    @contextmanager
    def open_or_fail(path: Path, key: str) -> Iterator[BinaryIO]:
        with opened(path, key) as file:
            if flag.exists():
                with local._as_storage_error(key):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file

    local._write_file = open_or_fail


def fill_process(flag: Path) -> None:
    """Let objects of a local storage, SQLite and probes of the disk find no room while `flag` exists, until the end."""
    fill(flag)
    usage: Any = shutil.disk_usage

    def measure(path: Any) -> Any:
        found = usage(path)
        return found._replace(free=0) if flag.exists() else found

    shutil.disk_usage = measure

    def limit_pages(connection: Any, record: Any, proxy: Any) -> None:
        if hasattr(connection, "execute") and "sqlite" in type(connection).__module__:
            connection.execute(f"PRAGMA max_page_count = {1 if flag.exists() else _ANY_PAGES}")  # at least those there

    event.listen(Pool, "checkout", limit_pages)
