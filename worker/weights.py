"""Digests of a model's files, which the worker gives its children: they are read again only if they are other files.

A child does not keep them itself, since what one has written another would believe.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from spard.digests import file_sha256, model_file_name, model_files
from spard.models.folder.encoder import encoder_digest

_SETTLED_NS = 2_000_000_000  # coarse clocks of file systems tell writes apart that are so far from each other
_KEPT = 4096  # files


def file_digests(model: str) -> dict[str, str]:
    """Return the SHA-256 of each file by its name that makes a model's digest."""
    return {model_file_name(path): _sha256(path.resolve()) for path in model_files(Path(model))}


def encoder_files_digest(folder: str) -> str:
    """Return the digest of a sentence encoder's files, as `spard.models.folder.encoder` gives it."""
    return encoder_digest(Path(folder), lambda path: _sha256(path.resolve()))


def _sha256(path: Path) -> str:
    """Read a file if it is another one than before, or was written to since, by its inode, size and times.

    One that was written to just now may be again without a sign, so that its digest is not kept.
    """
    found = path.stat()
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return file_sha256(path)
    return _cached_digest(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@lru_cache(maxsize=_KEPT)
def _cached_digest(path: Path, identity: tuple[int, ...]) -> str:
    return file_sha256(path)
