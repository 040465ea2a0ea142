"""Reads an adapter file by file from a folder, a tar of any compression, or a snapshot in a hub's cache.

`tar cf x.tar .` and a tar of the folder itself are equivalent. A link is followed only if a hub client made it, from a
snapshot to a blob beside it. Files that file managers and hubs leave behind are distinguished from files that a loader
may read.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spard.errors import NotProved

File = tuple[str, IO[bytes]]

_LEFT_BEHIND = frozenset({".DS_Store", ".gitattributes"})
_HUB_NOTES = ".cache/huggingface/"  # written by `hf download --local-dir`
_NOTES = (".metadata", ".lock", ".gitignore", "CACHEDIR.TAG")


@contextmanager
def open_packed(path: Path) -> Iterator[Iterator[File]]:
    """Yield an iterator over (name, file) of a folder or an archive; raise `NotProved` if it is unreadable."""
    if path.is_dir():
        yield _in_folder(path)
        return
    try:
        with tarfile.open(path, "r:*") as tar:
            yield _in_archive(tar)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise NotProved(f"{path.name} cannot be read as an archive: {_why(path, error)}.") from error


def _why(path: Path, error: Exception) -> str:
    """Return a short reason; tarfile's own message has a line for each format that it tried."""
    if "\n" not in (said := str(error)):
        return said
    return "it is no tar, or only the beginning of one" if path.stat().st_size else "it is empty"


def is_ignored(name: str) -> bool:
    """Return True for files that tools leave behind and that no loader reads."""
    return name.rpartition("/")[2] in _LEFT_BEHIND or (name.startswith(_HUB_NOTES) and name.endswith(_NOTES))


def plain_name(name: str) -> str:
    """Return the normalized name of an archive's entry; empty for the archive's root."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def find_root(names: Iterable[str], wanted: str) -> str:
    """Return the folder (with a slash) that contains `wanted` and all other files; "" for the archive's root."""
    names = [name for name in names if not is_ignored(name)]
    tops = {name.partition("/")[0] for name in names}
    if wanted not in names and len(tops) == 1 and (root := f"{tops.pop()}/") + wanted in names:
        return root
    return ""


def _in_folder(folder: Path) -> Iterator[File]:
    place = folder.resolve()
    blobs = place.parent.parent / "blobs" if place.parent.name == "snapshots" else None
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_blob = path.is_symlink() and path.is_file() and path.resolve().parent == blobs
        if (path.is_symlink() and not is_blob) or not (path.is_file() or path.is_dir()):
            raise NotProved(f"{name} is a link or a device, not a file.")
        if path.is_file():
            with path.open("rb") as file:
                yield name, file


def _in_archive(tar: tarfile.TarFile) -> Iterator[File]:
    for entry in tar:
        name = plain_name(entry.name)
        # Links and devices are rejected, too: a loader could follow them out of the folder.
        if entry.name.startswith("/") or ".." in name.split("/") or not (entry.isreg() or entry.isdir()):
            raise NotProved(f"The archive's entry {entry.name} is no plain file below its folder.")
        if entry.isdir():
            continue
        file = tar.extractfile(entry)
        if file is None or not name:
            raise NotProved(f"The archive's entry {entry.name} is no plain file below its folder.")
        yield name, file
