"""Download an account's files, checking the size that the account lists, and later the digest that was noted."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TypedDict

from app.move_in.api import Api
from app.move_in.ledger import Record
from spard.digests import file_sha256

FILES = "files"
TRIES = 4  # downloads of a file whose size differs from the account's list


class Download(TypedDict, total=False):
    """A downloaded file's path below the folder, size and digest; or the `problem` that prevented the download."""

    path: str
    bytes: int
    sha256: str
    problem: str


def download(api: Api, folder: Path, file_id: str, file: Record) -> Download:
    """Download a file into the folder `files`; its final name appears only when it is complete."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", str(file.get("filename") or "file"))[-80:]
    target, part = (folder / FILES / each for each in (f"{file_id}-{name}", f"{file_id}.part"))
    part.parent.mkdir(mode=0o700, exist_ok=True)
    size = 0
    for _ in range(TRIES):
        size, digest = api.call(lambda: _fetch(api, file_id, part))
        if file.get("bytes") in (None, size):
            part.replace(target)
            return {"path": f"{FILES}/{target.name}", "bytes": size, "sha256": digest}
    part.unlink()
    return {"problem": f"{size} of {file['bytes']} bytes arrived, {TRIES} times"}


def is_whole(folder: Path, known: Download) -> bool:
    """Return True if a downloaded file exists with the size and digest that were noted."""
    path = folder / known.get("path", "")
    return path.is_file() and path.stat().st_size == known.get("bytes") and file_sha256(path) == known.get("sha256")


def _fetch(api: Api, file_id: str, part: Path) -> tuple[int, str]:
    """Download to the file `part` and return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with api.client.files.with_streaming_response.content(file_id) as response, part.open("wb") as out:
        part.chmod(0o600)
        for chunk in response.iter_bytes():
            digest.update(chunk)
            size += out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return size, digest.hexdigest()
