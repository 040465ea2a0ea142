"""A folder as one file: a tar.gz whose bytes depend on the files' alone, not on when and where it was made."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

from spard.digests import file_sha256


def archive(folder: Path, path: Path) -> str:
    """Pack a folder's files and return the SHA-256 of what it became."""
    aside = path.with_name(f".{path.name}.aside")
    with (
        aside.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            tar.add(file, arcname=file.relative_to(folder).as_posix(), filter=_anonymous)
    aside.rename(path)
    return file_sha256(path)


def unpack(path: Path, folder: Path) -> None:
    """Unpack an archive into a folder, and refuse a file that would lie outside it."""
    with tarfile.open(path, "r:gz") as tar:
        tar.extractall(folder, filter="data")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mtime = 0
    entry.mode = 0o644
    return entry
