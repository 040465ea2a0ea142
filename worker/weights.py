"""Cache the digests of model files in the worker, which passes them to its children.

Children share no cache of their own: one could write a wrong digest that the next child trusts.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from spard.digests import file_sha256, model_file_name, model_files
from spard.models.folder.encoder import encoder_digest

_SETTLED_NS = 2_000_000_000  # even coarse file system clocks give two writes that are this far apart different times
_KEPT = 4096  # files


def file_digests(model: str) -> dict[str, str]:
    """Return the SHA-256 of each file that counts for a model's digest, by file name."""
    return {model_file_name(path): _sha256(path.resolve()) for path in model_files(Path(model))}


def encoder_files_digest(folder: str) -> str:
    """Return the digest of a sentence encoder's folder, as `spard.models.folder.encoder` defines it."""
    return encoder_digest(Path(folder), lambda path: _sha256(path.resolve()))


def _sha256(path: Path) -> str:
    """Return a file's SHA-256, from the cache if inode, size and times are unchanged.

    The digest of a file written within the last 2 s is not cached: another write could leave the same times.
    """
    found = path.stat()
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < _SETTLED_NS:
        return file_sha256(path)
    return _cached_digest(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@lru_cache(maxsize=_KEPT)
def _cached_digest(path: Path, identity: tuple[int, ...]) -> str:
    return file_sha256(path)
