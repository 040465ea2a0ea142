"""A machine's cache between jobs: embeddings of pools, audits of base models.

The name of an entry's file is the digest of everything that its content depends on. It is written to a temporary file
and renamed, so two jobs may write the same entry. It stores the digest of its content; an entry whose digest does not
match is computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spard.models.adapters import tensor_digest

log = logging.getLogger(__name__)


class FolderCache:
    """A cache in a folder, which may be deleted at any time.

    `tell` is called for each tensor that is returned, with its path below the folder, and True if it was just computed.
    """

    def __init__(self, folder: Path, tell: Callable[[str, bool], None] = lambda entry, made: None) -> None:
        self._folder, self._tell = folder, tell

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor cached under `key`, or call `make` and cache its result if the file is missing or damaged.

        The tensor is memory-mapped from the file, unless the file could not be written.
        """
        path = self._path(kind, key, "safetensors")
        found = _read_tensor(path)
        made = found is None
        if found is None:
            rows = {"rows": make()}
            _write(path, partial(save_file, rows, metadata={"sha256": tensor_digest(rows)}))
            found = _read_tensor(path)  # map the file, so that the computed copy can leave the memory
            if found is None:
                return rows["rows"]
        self._tell(path.relative_to(self._folder).as_posix(), made)
        return found

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the JSON value cached under `key`, or call `make` and cache its result."""
        path = self._path(kind, key, "json")
        found = _read_json(path)
        if found is None:
            found = make()
            text = json.dumps(found)
            entry = json.dumps({"sha256": _file_sha256(text), "content": text})
            _write(path, lambda aside: aside.write_text(entry))
        return found

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Lock an entry while it is computed; return None while another process holds the lock.

        The lock is released by closing the returned context, or by the kernel when the process ends. Where files cannot
        be locked the returned context locks nothing: two jobs may then compute the same entry, which is harmless.
        """
        path = self._path(kind, key, "claim")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as error:
            log.warning("not claimed: %s", error)
            return nullcontext()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            log.warning("not claimed: %s", error)
        return file

    def _path(self, kind: str, key: Mapping[str, Any], suffix: str) -> Path:
        return self._folder / kind / f"{_file_sha256(json.dumps(dict(key), sort_keys=True))}.{suffix}"


def _read_tensor(path: Path) -> Tensor | None:
    try:
        with safe_open(path, framework="pt") as file:
            rows: Tensor = file.get_tensor("rows")
            if file.metadata()["sha256"] == tensor_digest({"rows": rows}):
                return rows
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        log.warning("the cached %s cannot be read: %s", path.name, error)
        return None
    log.warning("the cached %s is damaged", path.name)
    return None


def _read_json(path: Path) -> Any:
    try:
        entry = json.loads(path.read_text())
        if _file_sha256(entry["content"]) == entry["sha256"]:
            return json.loads(entry["content"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the cached %s cannot be read: %s", path.name, error)
        return None
    log.warning("the cached %s is damaged", path.name)
    return None


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a cache entry; a failure costs time, not the job."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".aside-", delete=False) as file:
            aside = Path(file.name)
        try:
            write(aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        log.warning("not cached: %s", error)


def _file_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
