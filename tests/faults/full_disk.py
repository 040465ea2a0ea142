"""A disk without room, as files see it: writes of objects fail with ENOSPC as long as a flag lies there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from app.storage import local


def fill(flag: Path) -> None:
    """Let writes of this process to a local storage find no room while `flag` exists."""
    opened = local._written

    @contextmanager
    def open_or_fail(path: Path, key: str) -> Iterator[BinaryIO]:
        with opened(path, key) as file:
            if flag.exists():
                with local._as_storage_error(key):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file

    local._written = open_or_fail
