"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`, which takes that name at the end, or is removed on an error.

    The caller creates the file. A rename within one folder is atomic, so nobody reads a part of it.
    """
    aside = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file through a temporary file beside it; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path) as aside:
        aside.write_text(text, encoding="utf-8")
