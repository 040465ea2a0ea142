"""Packs a folder as a reproducible tar.gz, and reads an adapter file by file from a folder, a tar or a hub's cache.

The bytes of an archive depend only on the files. All files are in one top folder, so unpacking never spills files into
the current folder.

A tar that is read may have any compression; `tar cf x.tar .` and a tar of the folder itself are equivalent. A link is
followed only if a hub client made it, from a snapshot to a blob beside it. Files that file managers and hubs leave
behind are distinguished from files that a loader may read.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spard.digests import MANIFEST, file_sha256
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


def folder_name(job_id: str | None, step: int | None = None) -> str:
    """Return the top folder of an adapter's archive: the job's final adapter, or a checkpoint's with `step`."""
    parts = [job_id, f"step-{step}" if step else None, "adapter"]
    return "-".join(part for part in parts if part)


def archive(folder: Path, path: Path, top: str) -> str:
    """Pack the files of `folder` below `top` into the file `path`; return its SHA-256."""
    aside = path.with_name(f".{path.name}.aside")
    with (
        aside.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            tar.add(file, arcname=f"{top}/{file.relative_to(folder).as_posix()}", filter=_anonymous)
    aside.rename(path)
    return file_sha256(path)


def unpack(path: Path, folder: Path) -> None:
    """Unpack an adapter's files into `folder`, without the top folder (which early archives lack).

    Raises `tarfile.FilterError` for an entry outside of the folder.
    """

    def below_the_top(entry: tarfile.TarInfo, to: str) -> tarfile.TarInfo | None:
        name = f"{plain_name(entry.name)}/" if entry.isdir() else plain_name(entry.name)
        below = name.removeprefix(top)
        return tarfile.data_filter(entry.replace(name=below, deep=False), to) if below.strip("/") else None

    with tarfile.open(path, "r:*") as tar:
        top = find_root((plain_name(entry.name) for entry in tar.getmembers() if entry.isreg()), MANIFEST)
        tar.extractall(folder, filter=below_the_top)  # noqa: S202 - which is tarfile's own data filter


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    # Owner, times and modes of the building machine must neither leak nor change the digest.
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    entry.mode = 0o644
    return entry
