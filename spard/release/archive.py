"""Packs a folder as a reproducible tar.gz, whose bytes depend only on the files.

All files are in one top folder, so unpacking never spills files into the current folder.
"""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

from spard.digests import MANIFEST, file_sha256
from spard.release.packed import find_root, plain_name


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
